"""Packed weights as files: written once, then mapped by every start that fits.

A file holds the parameters of one unit (a layer, the prelude …) in the layout that kernels read,
each at a multiple of 64 bytes. The manifest beside them says what they were made from; files whose
source, variant or layout has changed since are not used: see `mapped_weights`.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from buddy_pipeline.compile.manifest import Parameter, PartitionPlan
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import Checkpoint
from buddy_pipeline.ranks.memory_blocks import ALIGNMENT, aligned_zeros
from buddy_pipeline.ranks.packing import check_parameters, pack, pack_parameters, packed_bytes
from buddy_pipeline.ranks.weight_manifest import (
    describe_source,
    describe_stat,
    is_unchanged,
    parameter_key,
    read_weights_manifest,
    write_weights_manifest,
)


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
    return export.finish(export.write(export.missing))


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
        self._source = describe_source(checkpoint.path, variant)
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

    def write(self, names: Iterable[str]) -> dict[str, str]:
        """Writes some of the missing files; the SHA-256 of each."""
        units = [self._units[name] for name in names]
        with self._writing():
            packed = None if self._direct or not units else _all_in_one(units, self._checkpoint)
            return {
                unit.name: _write_unit(self._folder, unit, self._checkpoint, packed)
                for unit in units
            }

    def finish(self, hashes: Mapping[str, str]) -> Exported:
        """Writes the manifest, when all files are there: one process does.

        hashes: SHA-256 of all files that were missing, from whoever wrote each.
        """
        with self._writing():
            for name in self.missing:
                described = _describe_file(self._folder, self._units[name], hashes[name])
                self._files[name] = described
            if self.missing:
                write_weights_manifest(self._folder, self._source, self._files)
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
) -> str:
    """Writes a unit's file whole or not at all; its SHA-256."""
    digest = hashlib.sha256()
    temporary = folder / f".{unit.name}.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            for parameter in unit.places:
                place = _packed(parameter, checkpoint) if packed is None else packed[parameter]
                for piece in (place.data, bytes(-len(place) % ALIGNMENT)):
                    file.write(piece)
                    digest.update(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(folder / unit.name)
    finally:
        temporary.unlink(missing_ok=True)
    return digest.hexdigest()


def _packed(parameter: Parameter, checkpoint: Checkpoint) -> np.ndarray:
    place = aligned_zeros((packed_bytes(parameter),), np.uint8)
    pack(parameter, checkpoint, place)
    return place


def _describe_file(folder: Path, unit: _UnitFile, digest: str) -> dict[str, Any]:
    parameters = {parameter_key(parameter): offset for parameter, offset in unit.places.items()}
    return {**describe_stat(folder / unit.name), "sha256": digest, "parameters": parameters}


def _is_whole(folder: Path, unit: _UnitFile, files: Mapping[str, Any]) -> bool:
    """Whether a unit's file is there as this export would write it."""
    entry = files.get(unit.name)
    if entry is None or not is_unchanged(folder / unit.name, entry):
        return False
    return bool(entry == _describe_file(folder, unit, entry["sha256"]))
