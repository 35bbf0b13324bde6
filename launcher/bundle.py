"""Bundles: one file a rank that runs with no compiler and, with weights inside, no model.

A bundle is a zip archive without compression, so that any tool lists it and weights are mapped
where they lie:

    bundle.json     which rank of which world, the build's configuration, hashes of all files
    plan.json       what the rank's stage needs
    objects/NAME.o
    weights/        packed weights and their manifest, each file at a multiple of 4096 bytes
    tokenizer/      the model's tokenizer, with weights
"""

import hashlib
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.compiled_files import read_objects
from buddy_pipeline.compile.manifest import Parameter, Plan
from buddy_pipeline.launcher.build_config import BuildConfig, config_of
from buddy_pipeline.launcher.bundle_weights import (
    WeightFile,
    describe_weights,
    start_fault,
    whole_fault,
)
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import block_role, layer_ranges
from buddy_pipeline.partition.sealed_json import seal, unseal
from buddy_pipeline.ranks.checkpoint import Checkpoint, TokenizerSource, open_checkpoint
from buddy_pipeline.ranks.mapped_weights import Place, map_file, parameter_places
from buddy_pipeline.ranks.packing import packed_bytes
from buddy_pipeline.ranks.weight_manifest import parameter_key

#: Raised whenever the meaning of a field or file changes.
FORMAT_VERSION = 3
_INDEX, _PLAN = "bundle.json", "plan.json"
_TOKENIZER = "tokenizer/tokenizer.json"
#: Weights start at pages, so that a map of one is a map of whole pages.
_PAGE = 4096
#: Bytes of a local file header before the name (APPNOTE.TXT 4.3.7).
_LOCAL_HEADER = 30


def bundle_name(rank: int, world: int) -> str:
    """The file name of a rank's bundle."""
    return f"rank{rank}-of-{world}.zip"


def write_bundle(
    path: Path, directory: BuildDirectory, config: BuildConfig, rank: int, weights: bool
) -> None:
    """Packs one rank of a compiled build directory; UserError if the directory lacks something."""
    manifest, plan = directory.read_manifest(), directory.read_plan()
    ranges = layer_ranges(plan.layers, manifest.world, manifest.split)
    partitions = plan.for_rank(ranges[rank], block_role(rank, manifest.world))
    objects = read_objects(directory, manifest, plan.objects(partitions))
    parameters = [p for partition in partitions for p in partition.parameters]
    index: dict[str, Any] = {
        "rank": rank,
        "world": manifest.world,
        "split": list(manifest.split),
        "config": json.loads(config.to_json()),
        "objects": {
            key: [f"objects/{key}.o", hashlib.sha256(data).hexdigest()]
            for key, data in objects.items()
        },
        "weights": {},
        "weight_files": {},
        "tokenizer": None,
    }
    packed: Mapping[str, Place] = {}
    tokenizer = None
    if weights:
        checkpoint = open_checkpoint(Path(config.model_path))
        tokenizer = checkpoint.tokenizer
        packed = _current_places(directory, config, rank, parameters, checkpoint.path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            for key, data in objects.items():
                archive.writestr(f"objects/{key}.o", data)
            archive.writestr(_PLAN, plan.to_json())
            for file in sorted({place.file for place in packed.values()}):
                name = f"weights/{file.name}"
                _write_aligned(archive, name, file)
                index["weight_files"][name] = asdict(describe_weights(file))
            index["weights"] = {
                key: [f"weights/{place.file.name}", place.offset] for key, place in packed.items()
            }
            if tokenizer is not None:
                index["tokenizer"] = _describe_tokenizer(tokenizer)
                if tokenizer.json_path is not None:
                    archive.write(tokenizer.json_path, _TOKENIZER)
            archive.writestr(_INDEX, json.dumps(seal(FORMAT_VERSION, index)))
        temporary.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _current_places(
    directory: BuildDirectory,
    config: BuildConfig,
    rank: int,
    parameters: Sequence[Parameter],
    source: Path,
) -> Mapping[str, Place]:
    """Where the packed weights lie; UserError if there are none, or the model has changed since."""
    if parameter_places(directory.weights, parameters) is None:
        raise UserError(
            f"build directory '{directory.root}' has no packed weights for rank {rank}:"
            " import it without --skip-weights, or pack with --no-weights"
        )
    places = parameter_places(directory.weights, parameters, (source, config.variant))
    if places is None:
        raise UserError(
            f"{directory.weights} was not packed from what {source} holds now:"
            " import and compile it again, or pack with --no-weights"
        )
    return places


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"bundle {path} cannot be written ({error.strerror}): give another folder with --output"
    )


class Bundle:
    """An opened bundle."""

    def __init__(self, path: Path) -> None:
        """Reads the bundle's index; UserError if it is no whole bundle of this version."""
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
            index = unseal(FORMAT_VERSION, self._archive.read(_INDEX))
            self.config = config_of(index["config"], f"bundle {path}")
            self.plan = Plan.from_json(self._archive.read(_PLAN))
        except FileNotFoundError:
            raise UserError(
                f"bundle {path} does not exist: run 'buddy-pipeline pack' for this world"
            ) from None
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise self._broken(error) from None
        except ValueError as error:
            raise UserError(
                f"bundle {path}: what it says of itself {error}: run 'buddy-pipeline pack' again"
            ) from None
        self.rank, self.world = int(index["rank"]), int(index["world"])
        self.split = tuple(int(size) for size in index["split"])
        self._index = index
        self._bytes = map_file(path)
        self._files = {n: WeightFile(**f) for n, f in index["weight_files"].items()}
        for name, described in self._files.items():
            self._check(name, start_fault(self._data(name), described))

    def verify(self) -> int:
        """Reads all that is inside; how many files that are. UserError if one is not as it was
        packed."""
        for key in self._index["objects"]:
            self._object(key)
        for name, described in self._files.items():
            self._check(name, whole_fault(self._data(name), described))
        if self._index["tokenizer"] is not None and self._index["tokenizer"].get("has_json"):
            self._read(_TOKENIZER)
        return len(self._archive.infolist())

    def objects(self, keys: Sequence[str]) -> list[bytes]:
        """Object files; UserError if one is not as it was packed."""
        return [self._object(key) for key in keys]

    def weights(self, parameters: Iterable[Parameter]) -> Mapping[Parameter, np.ndarray] | None:
        """Packed parameters, mapped from the file; None if the bundle has none."""
        places = self._index["weights"]
        if not places:
            return None
        files: dict[str, np.ndarray] = {}
        found = {}
        for parameter in dict.fromkeys(parameters):
            name, offset = places[parameter_key(parameter)]
            if name not in files:
                files[name] = self._data(name)
            found[parameter] = files[name][offset : offset + packed_bytes(parameter)]
        return found

    def checkpoint(self, cache: Cache) -> Checkpoint | None:
        """The model's configuration and tokenizer without tensors; None if they are not inside.

        The tokenizer's file is unpacked into the cache, unless it is there; UserError if it cannot
        be written.
        """
        if self._index["tokenizer"] is None:
            return None
        described = dict(self._index["tokenizer"])
        if described.pop("has_json", False):
            path = cache.root / "bundles" / self.digest() / "tokenizer.json"
            described["json_path"] = path
            data = self._read(_TOKENIZER)
            if not (path.is_file() and path.read_bytes() == data):
                cache.write(path, data)
        source = TokenizerSource(**{**described, "eos_ids": tuple(described["eos_ids"])})
        return Checkpoint(self.path, self.config.model, {}, source)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file inside."""
        return {entry.filename: entry.file_size for entry in self._archive.infolist()}

    def digest(self) -> str:
        """A short name for what is inside."""
        return hashlib.sha256(json.dumps(self._index).encode()).hexdigest()[:16]

    def _object(self, key: str) -> bytes:
        try:
            name, digest = self._index["objects"][key]
        except KeyError as error:
            raise self._broken(error) from None
        data = self._read(name)
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._broken(f"{name} was altered")
        return data

    def _read(self, name: str) -> bytes:
        """An entry's bytes; UserError if they are not there as the archive's checksum has them."""
        try:
            return self._archive.read(name)
        except (KeyError, OSError, zipfile.BadZipFile) as error:
            raise self._broken(error) from None

    def _data(self, name: str) -> np.ndarray:
        """An entry's bytes, mapped; UserError if it is not there as it was written."""
        try:
            entry = self._archive.getinfo(name)
        except KeyError as error:
            raise self._broken(error) from None
        header = entry.header_offset
        lengths = self._bytes[header + 26 : header + _LOCAL_HEADER]
        if entry.compress_type != zipfile.ZIP_STORED or len(lengths) < 4:
            raise self._broken(f"{name} was stored by another program")
        start = header + _LOCAL_HEADER + int(lengths.view("<u2").astype(int).sum())
        return self._bytes[start : start + entry.file_size]

    def _check(self, name: str, fault: str | None) -> None:
        if fault is not None:
            raise UserError(
                f"bundle {self.path}: {name} is not as it was packed ({fault}): copy or pack it"
                " again"
            )

    def _broken(self, error: object) -> UserError:
        return UserError(
            f"bundle {self.path} is cut short or no bundle ({error}): copy or pack it again"
        )


def _describe_tokenizer(source: TokenizerSource) -> dict[str, Any]:
    return {
        "has_json": source.json_path is not None,
        "config": source.config,
        "gguf": None if source.gguf is None else dict(source.gguf),
        "chat_template": source.chat_template,
        "eos_ids": list(source.eos_ids),
        "bos_id": source.bos_id,
        "add_bos": source.add_bos,
    }


def _write_aligned(archive: zipfile.ZipFile, name: str, file: Path) -> None:
    """Stores a file so that its bytes start at a page: padding goes into the header's extra field
    (one record of a private kind, APPNOTE.TXT 4.5)."""
    info = zipfile.ZipInfo(name)
    info.file_size = file.stat().st_size
    large = info.file_size > zipfile.ZIP64_LIMIT // 2
    zip64 = 20 if large else 0  # zipfile puts this record in front of ours
    record = 4
    assert archive.fp is not None
    start = archive.fp.tell() + _LOCAL_HEADER + len(name) + zip64 + record
    padding = -start % _PAGE
    info.extra = struct.pack("<HH", _PADDING_KIND, padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=large) as entry, file.open("rb") as source:
        shutil.copyfileobj(source, entry, 1 << 20)


_PADDING_KIND = 0xD935  # as Android's zipalign uses for the same purpose
