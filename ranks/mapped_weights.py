"""Packed weights mapped from the files that `weight_files` has written."""

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buddy_pipeline.compile.manifest import Parameter
from buddy_pipeline.ranks.packing import packed_bytes
from buddy_pipeline.ranks.weight_manifest import (
    describe_source,
    is_unchanged,
    parameter_key,
    read_weights_manifest,
)


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
    if source is not None and manifest["source"] != describe_source(*source):
        return None
    places = {
        key: Place(folder / name, offset)
        for name, file in manifest["files"].items()
        if is_unchanged(folder / name, file)
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


def map_file(path: Path) -> np.ndarray:
    """A file's bytes, uint8, read-only; pages come in as they are touched."""
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(buffer, np.uint8)
