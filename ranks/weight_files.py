"""Packed weights as files: written once, then mapped by every start that fits.

A file holds the parameters of one unit (a layer, the prelude …) in the layout that kernels read,
each at a multiple of 64 bytes. `.buddy_weights_manifest.json` says what they were made from; files
whose source, variant or layout has changed since are not used.
"""

import hashlib
import json
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from buddy_pipeline.compile.cache import write_atomically
from buddy_pipeline.compile.manifest import Parameter, PartitionPlan
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.sealed_json import seal, unseal
from buddy_pipeline.ranks.checkpoint import Checkpoint
from buddy_pipeline.ranks.memory_blocks import ALIGNMENT, aligned_zeros
from buddy_pipeline.ranks.packing import check_parameters, pack, pack_parameters, packed_bytes

MANIFEST = ".buddy_weights_manifest.json"
#: Raised whenever packed bytes change their meaning.
_FORMAT_VERSION = 2


@dataclass(frozen=True)
class Exported:
    """What an export did."""

    written: tuple[str, ...]
    reused: tuple[str, ...]
    bytes: int  # of all files that were asked for
    seconds: float


@dataclass(frozen=True)
class _UnitFile:
    """The parameters of one unit that no unit before it has, and where they lie in its file."""

    name: str
    places: dict[Parameter, int]
    size: int


def export_weights(
    folder: Path,
    partitions: Sequence[PartitionPlan],
    checkpoint: Checkpoint,
    variant: str,
    *,
    direct: bool = True,
    reuse: bool = True,
) -> Exported:
    """Writes the packed parameters of these partitions, a file for each unit that lacks one.

    Arguments and errors are those of `WeightExport`.
    """
    export = WeightExport(folder, partitions, checkpoint, variant, direct=direct, reuse=reuse)
    export.write(export.missing)
    return export.finish()


class WeightExport:
    """An export that several processes may do together: each writes some of the missing files.

    `direct` streams one parameter after the other to disk; otherwise all that a process writes are
    packed in memory and joined first. The files are the same, byte for byte. Without `reuse` all
    are written anew. Raises UserError for a checkpoint that does not fit, or a folder that cannot
    be written.
    """

    def __init__(
        self,
        folder: Path,
        partitions: Sequence[PartitionPlan],
        checkpoint: Checkpoint,
        variant: str,
        *,
        direct: bool = True,
        reuse: bool = True,
    ) -> None:
        self._started = time.perf_counter()
        check_parameters((p for partition in partitions for p in partition.parameters), checkpoint)
        self._folder, self._checkpoint, self._direct = folder, checkpoint, direct
        self._units = {unit.name: unit for unit in _unit_files(partitions)}
        self._source = _describe_source(checkpoint.path, variant)
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
        manifest = read_weights_manifest(folder) if reuse else None
        fits = manifest is not None and manifest["source"] == self._source
        self._files: dict[str, Any] = manifest["files"] if manifest and fits else {}
        self.missing = {
            name: unit.size
            for name, unit in self._units.items()
            if not _is_whole(folder, unit, self._files)
        }
        """The files to write, and their bytes."""

    def write(self, names: Iterable[str]) -> None:
        """Writes some of the missing files."""
        units = [self._units[name] for name in names]
        with self._writing():
            packed = None if self._direct or not units else _all_in_one(units, self._checkpoint)
            for unit in units:
                _write_unit(self._folder, unit, self._checkpoint, packed)

    def finish(self) -> Exported:
        """Writes the manifest, when all files are there: one process does."""
        with self._writing():
            for name in self.missing:
                self._files[name] = _describe_file(self._folder, self._units[name])
            if self.missing:
                content = seal(_FORMAT_VERSION, {"source": self._source, "files": self._files})
                write_atomically(self._folder / MANIFEST, json.dumps(content, indent=1).encode())
        return Exported(
            tuple(self.missing),
            tuple(name for name in self._units if name not in self.missing),
            sum(unit.size for unit in self._units.values()),
            time.perf_counter() - self._started,
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"packed weights cannot be written to '{self._folder}': {error.strerror}; give"
                " another --build-dir, or --skip-weights"
            ) from error


@dataclass(frozen=True)
class Place:
    """Where a packed parameter lies."""

    file: Path
    offset: int


def parameter_places(
    folder: Path, parameters: Iterable[Parameter], source: tuple[Path, str] | None = None
) -> dict[str, Place] | None:
    """Where the packed parameters lie, by `parameter_key`.

    None if some are not there or not as they were written, or if they were not made from what is
    at `source`, a checkpoint's path and the variant, now.
    """
    manifest = read_weights_manifest(folder)
    if manifest is None:
        return None
    if source is not None and manifest["source"] != _describe_source(*source):
        return None
    places = {
        key: Place(folder / name, offset)
        for name, file in manifest["files"].items()
        if _is_unchanged(folder / name, file)
        for key, offset in file["parameters"].items()
    }
    wanted = [parameter_key(parameter) for parameter in parameters]
    return {key: places[key] for key in wanted} if places.keys() >= set(wanted) else None


def map_weights(
    folder: Path, parameters: Sequence[Parameter], source: tuple[Path, str] | None = None
) -> dict[Parameter, np.ndarray] | None:
    """The packed parameters, uint8, mapped from the folder's files; None as `parameter_places`."""
    places = parameter_places(folder, parameters, source)
    if places is None:
        return None
    maps = {place.file: map_file(place.file) for place in places.values()}
    found = {}
    for parameter in parameters:
        place = places[parameter_key(parameter)]
        end = place.offset + packed_bytes(parameter)
        found[parameter] = maps[place.file][place.offset : end]
    return found


def _unit_files(partitions: Sequence[PartitionPlan]) -> list[_UnitFile]:
    """The files of these partitions; a parameter that several units have is in the first's."""
    seen: set[Parameter] = set()
    by_unit: dict[str, dict[Parameter, int]] = {}
    sizes: dict[str, int] = {}
    for partition in partitions:
        places = by_unit.setdefault(partition.unit, {})
        for parameter in partition.parameters:
            if parameter not in seen:
                seen.add(parameter)
                places[parameter] = sizes.get(partition.unit, 0)
                size = -(-packed_bytes(parameter) // ALIGNMENT) * ALIGNMENT
                sizes[partition.unit] = places[parameter] + size
    return [
        _UnitFile(weight_file_name(unit), places, sizes[unit])
        for unit, places in by_unit.items()
        if places
    ]


def weight_file_name(unit: str) -> str:
    """The file that holds the weights of a unit ("prelude", a layer's number …)."""
    return f"layer{unit}.bin" if unit.isdigit() else f"{unit}.bin"


def _all_in_one(
    units: Sequence[_UnitFile], checkpoint: Checkpoint
) -> Mapping[Parameter, np.ndarray]:
    """Every parameter packed in memory at once, then joined: twice the weights."""
    wanted = [parameter for unit in units for parameter in unit.places]
    packed = pack_parameters(wanted, checkpoint, threads=1)
    joined = np.concatenate([packed[parameter] for parameter in wanted])
    ends = np.cumsum([packed_bytes(parameter) for parameter in wanted])
    return {p: joined[end - packed_bytes(p) : end] for p, end in zip(wanted, ends, strict=True)}


def _write_unit(
    folder: Path,
    unit: _UnitFile,
    checkpoint: Checkpoint,
    packed: Mapping[Parameter, np.ndarray] | None,
) -> None:
    """Writes a unit's file whole or not at all."""
    temporary = folder / f".{unit.name}.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            for parameter, offset in unit.places.items():
                file.seek(offset)
                place = _packed(parameter, checkpoint) if packed is None else packed[parameter]
                file.write(place.data)
            file.truncate(unit.size)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / unit.name)
    finally:
        temporary.unlink(missing_ok=True)


def _packed(parameter: Parameter, checkpoint: Checkpoint) -> np.ndarray:
    place = aligned_zeros((packed_bytes(parameter),), np.uint8)
    pack(parameter, checkpoint, place)
    return place


def parameter_key(parameter: Parameter) -> str:
    """What a parameter's packed bytes depend on, besides the source."""
    return hashlib.sha256(json.dumps(asdict(parameter)).encode()).hexdigest()[:32]


def _describe_source(path: Path, variant: str) -> dict[str, Any]:
    """The files of a checkpoint as they are now."""
    files = {file.name: _describe_stat(file) for file in _source_files(path)}
    return {"path": str(path.resolve()), "variant": variant, "files": files}


def _source_files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted([*path.glob("*.safetensors*"), *path.glob("config.json")])
    else:
        yield path


def _describe_stat(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _describe_file(folder: Path, unit: _UnitFile) -> dict[str, Any]:
    parameters = {parameter_key(parameter): offset for parameter, offset in unit.places.items()}
    return {**_describe_stat(folder / unit.name), "parameters": parameters}


def _is_whole(folder: Path, unit: _UnitFile, files: Mapping[str, Any]) -> bool:
    """Whether a unit's file is there as this export would write it."""
    entry = files.get(unit.name)
    if entry is None or not _is_unchanged(folder / unit.name, entry):
        return False
    return bool(entry == _describe_file(folder, unit))


def _is_unchanged(path: Path, entry: Mapping[str, Any]) -> bool:
    if not path.is_file():
        return False
    return _describe_stat(path) == {name: entry[name] for name in ("bytes", "mtime_ns")}


def read_weights_manifest(folder: Path) -> dict[str, Any] | None:
    """The `source` and `files` of a folder's manifest; None if it has none that can be used."""
    try:
        return unseal(_FORMAT_VERSION, json.loads((folder / MANIFEST).read_text()))
    except (OSError, ValueError):
        return None


def map_file(path: Path) -> np.ndarray:
    """A file's bytes, uint8, read-only; pages come in as they are touched."""
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(buffer, np.uint8)
