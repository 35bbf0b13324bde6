"""The check of a build directory: whether its files are what its manifest, plan and graph say."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.imported_files import Share
from buddy_pipeline.compile.manifest import PartitionPlan, Plan
from buddy_pipeline.compile.object_file import read_object_file
from buddy_pipeline.compile.partition_manifest import Entry, ObjectEntry, PartitionManifest
from buddy_pipeline.compile.source import INDEX, read_index
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.fragments import resolve
from buddy_pipeline.partition.graph import GraphNode, NodeKind, Partition, node_table


@dataclass(frozen=True)
class DirectoryReport:
    """What `check_directory` saw."""

    partitions: int
    mlir_files: int
    objects: int
    """Those that are compiled."""
    faults: tuple[str, ...]
    """One line each, with what mends it where that is one command."""

    @property
    def ok(self) -> bool:
        """Whether everything is as it was written."""
        return not self.faults


def check_directory(
    directory: BuildDirectory,
    manifest: PartitionManifest,
    plan: Plan,
    nodes: Sequence[GraphNode],
    partitions: Sequence[Partition],
    ranges: Sequence[range],
) -> DirectoryReport:
    """Compares the files with manifest and plan, and these with the graph's partitions.

    nodes, partitions: the exported graph, and as it is cut. ranges: layers by rank.
    """
    files = _mlir_hashes(manifest)
    compiled = [entry for entry in manifest.objects if entry.file is not None]
    faults = [
        *_cut_faults(plan, nodes, partitions),
        *_entry_faults(manifest, plan, ranges),
        *_file_faults(directory.mlir, files),
        *(fault for entry in manifest.objects for fault in _index_faults(directory, entry)),
        *(fault for entry in compiled for fault in _object_faults(directory, entry)),
    ]
    if compiled and len(compiled) < len(manifest.objects):
        all_of_them = counted(len(manifest.objects), "object")
        faults.append(f"only {len(compiled)} of {all_of_them} are compiled: {_COMPILE}")
    return DirectoryReport(len(manifest.partitions), len(files), len(compiled), tuple(faults))


def _mlir_hashes(manifest: PartitionManifest) -> dict[str, str]:
    """SHA-256 of every file below mlir/ that the manifest names."""
    files = {file: manifest.phase_hashes[p] for p, file in manifest.phases.items() if file}
    for entry in manifest.partitions:
        files |= {file: entry.hashes[phase] for phase, file in entry.files.items()}
    for object_entry in manifest.objects:
        files |= object_entry.mlir
    return files


def _cut_faults(
    plan: Plan, nodes: Sequence[GraphNode], partitions: Sequence[Partition]
) -> Iterator[str]:
    """Where the plan is not the graph's cut."""
    table = node_table(nodes)
    loaded = (NodeKind.PARAMETER, NodeKind.CONSTANT)

    def passed(names: Sequence[str]) -> list[str]:
        found = dict.fromkeys(resolve(name, table) for name in names)
        return [name for name in found if table[name].kind not in loaded]

    cut = [(p.name, str(p.unit), sorted(passed(p.inputs))) for p in partitions]
    planned = [(p.name, p.unit, sorted(p.inputs)) for p in plan.partitions]
    for number in range(max(len(cut), len(planned))):
        one, other = cut[number : number + 1], planned[number : number + 1]
        if one != other:
            yield f"partition {number} of the plan is {other}, but the graph's is {one}"


def _entry_faults(
    manifest: PartitionManifest, plan: Plan, ranges: Sequence[range]
) -> Iterator[str]:
    """Where the manifest's partitions are not the plan's, or are missing."""
    owners = Share.of(plan, ranges, manifest.ranks).owners
    wanted = {
        number
        for number, partition in enumerate(plan.partitions)
        if set(owners[partition.name]) & set(manifest.ranks)
    }
    for entry in manifest.partitions:
        if entry.number not in wanted:
            yield f"partition {entry.name} is no rank's that was imported"
        elif not _fits(entry, plan.partitions[entry.number], owners[entry.name]):
            yield f"partition {entry.name} of the manifest is not as the plan has it"
    for number in sorted(wanted - {entry.number for entry in manifest.partitions}):
        yield f"partition {plan.partitions[number].name} is not in the manifest"


def _fits(entry: Entry, partition: PartitionPlan, owners: tuple[int, ...]) -> bool:
    described = (entry.name, entry.unit, entry.template, entry.inputs, entry.outputs)
    planned = (partition.name, partition.unit, partition.template)
    return (*planned, partition.inputs, partition.outputs) == described and (
        entry.owner_ranks == owners
    )


def _file_faults(folder: Path, hashes: dict[str, str]) -> Iterator[str]:
    for name, digest in hashes.items():
        code = "/" in name  # else an entry, which says where code is and is not compiled
        yield from _bytes_faults(folder / name, digest, _IMPORT, _EDITED if code else _IMPORT)


def _index_faults(directory: BuildDirectory, entry: ObjectEntry) -> Iterator[str]:
    """Where the index of an object's MLIR, which a compile starts from, is not as it was."""
    folder = directory.mlir / entry.name
    try:
        read_index(folder)
    except OSError as error:
        yield f"{folder / INDEX} cannot be read ({error.strerror}): {_IMPORT}"
    except ValueError as error:
        yield f"{folder}/{error}: {_IMPORT}"


def _object_faults(directory: BuildDirectory, entry: ObjectEntry) -> Iterator[str]:
    """Where an object is not as it was compiled, or lacks what it should export."""
    assert entry.file is not None and entry.sha256 is not None
    path = directory.objects / entry.file
    faults = list(_bytes_faults(path, entry.sha256, _COMPILE, _COMPILE))
    yield from faults
    if faults:
        return
    found = read_object_file(path.read_bytes()).symbols
    exported = {symbol.name for symbol in found if symbol.is_global and symbol.is_defined}
    for symbol in entry.symbols:
        if symbol not in exported:
            yield f"{path} does not export {symbol}: {_COMPILE}"


def _bytes_faults(path: Path, digest: str, missing: str, changed: str) -> Iterator[str]:
    """Where a file is not what was written; `missing` and `changed` are what mends that."""
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            yield f"{path} was changed since it was written: {changed}"
    except OSError as error:
        yield f"{path} cannot be read ({error.strerror}): {missing}"


_IMPORT = "run 'buddy-pipeline import' again"
_COMPILE = "run 'buddy-pipeline compile' again"
_EDITED = f"{_IMPORT} to restore it, or 'buddy-pipeline compile' to take it as it is"
