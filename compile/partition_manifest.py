"""`partition_manifest.json`: what lies in a build directory, for people and for the next stage."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Raised whenever the meaning of a manifest's field changes.
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Entry:
    """One partition in the manifest."""

    number: int
    name: str
    unit: str
    owner_ranks: tuple[int, ...]
    template: str
    source: str  # folder of its code below mlir/
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    files: dict[str, str]  # phase: file below mlir/
    hashes: dict[str, str]  # phase: SHA-256


@dataclass(frozen=True)
class ObjectEntry:
    """One object: its code's folder, the hashes of its MLIR, and its file once it is compiled."""

    name: str
    key: str
    symbols: tuple[str, ...]
    mlir: dict[str, str]  # file below mlir/: SHA-256
    file: str | None = None  # below objects/
    sha256: str | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class PartitionManifest:
    """`partition_manifest.json`."""

    config: str  # SHA-256 of the configuration it was made from
    made_with: dict[str, str]
    variant: str
    strategy: str
    sharing: str
    world: int
    ranks: tuple[int, ...]  # whose partitions are here
    split: tuple[int, ...]  # layers of each rank
    counts: dict[str, int]
    phases: dict[str, str | None]  # phase: combined entry file, if written
    shared_by_phases: str
    partitions: tuple[Entry, ...]
    objects: tuple[ObjectEntry, ...]

    def to_json(self) -> str:
        """JSON text with a checksum, so that a change by hand is noticed."""
        body = asdict(self)
        return (
            json.dumps({"format": FORMAT_VERSION, "checksum": _checksum(body), **body}, indent=1)
            + "\n"
        )


def parse_manifest(data: Any) -> PartitionManifest:
    """The manifest of `to_json`'s data; ValueError, saying why, for any other."""
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT_VERSION:
        raise ValueError("was written by another version")
    if data.pop("checksum", None) != _checksum(data):
        raise ValueError("was changed after it was written")
    return _manifest(data)


def _checksum(body: Mapping[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _manifest(data: Mapping[str, Any]) -> PartitionManifest:
    """The manifest of JSON data whose checksum is right."""
    partitions = tuple(
        Entry(
            **{
                **entry,
                "owner_ranks": tuple(entry["owner_ranks"]),
                "inputs": tuple(entry["inputs"]),
                "outputs": tuple(entry["outputs"]),
            }
        )
        for entry in data["partitions"]
    )
    objects = tuple(
        ObjectEntry(**{**entry, "symbols": tuple(entry["symbols"])}) for entry in data["objects"]
    )
    return PartitionManifest(
        **{
            **data,
            "ranks": tuple(data["ranks"]),
            "split": tuple(data["split"]),
            "partitions": partitions,
            "objects": objects,
        }
    )
