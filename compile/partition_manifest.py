"""`partition_manifest.json`: what lies in a build directory, for people and for the next stage."""

import json
from dataclasses import asdict, dataclass

import msgspec

from buddy_pipeline.compile.source import Source
from buddy_pipeline.partition.sealed_json import seal, unseal

#: Raised whenever the meaning of a manifest's field changes.
FORMAT_VERSION = 2


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
    phases: dict[str, str | None]  # phase: combined entry file below mlir/, if written
    phase_hashes: dict[str, str]  # phase: SHA-256 of that file
    shared_by_phases: str
    partitions: tuple[Entry, ...]
    objects: tuple[ObjectEntry, ...]

    def to_json(self) -> str:
        """Sealed JSON text."""
        return json.dumps(seal(FORMAT_VERSION, asdict(self)), indent=1) + "\n"


def source_hashes(source: Source) -> dict[str, str]:
    """SHA-256 of a source's files, by their place below mlir/."""
    return {f"{source.name}/{name}": digest for name, digest in source.hashes().items()}


def parse_manifest(text: str | bytes) -> PartitionManifest:
    """The manifest of `to_json`'s text; ValueError, saying why, for any other."""
    return msgspec.convert(unseal(FORMAT_VERSION, text), PartitionManifest)
