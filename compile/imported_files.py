"""What the import stage leaves in a build directory: MLIR, graph, plan and manifest."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.entry_files import (
    PHASES,
    emit_forward,
    emit_subgraph,
    forward_name,
    subgraph_name,
)
from buddy_pipeline.compile.manifest import Plan
from buddy_pipeline.compile.partition_manifest import (
    Entry,
    ObjectEntry,
    PartitionManifest,
    source_hashes,
)
from buddy_pipeline.compile.source import read_source
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import block_role

#: What the manifest says on prefill and decode.
_SHARED = (
    "Graphs are exported with one token and compiled for any number: the prefill and the decode "
    "file of a partition are entries to the same code."
)


@dataclass(frozen=True)
class Share:
    """Which ranks there are, and whose partitions are wanted."""

    ranges: tuple[range, ...]  # layers by rank
    ranks: tuple[int, ...]
    owners: Mapping[str, tuple[int, ...]]  # partition: the ranks that run it

    @staticmethod
    def of(plan: Plan, ranges: Sequence[range], ranks: Sequence[int]) -> "Share":
        """The share of `ranks` in a pipeline with these layers (index = rank)."""
        owners: dict[str, tuple[int, ...]] = {p.name: () for p in plan.partitions}
        for rank, layers in enumerate(ranges):
            for partition in plan.for_rank(layers, block_role(rank, len(ranges))):
                owners[partition.name] += (rank,)
        return Share(tuple(ranges), tuple(ranks), owners)

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of each rank."""
        return tuple(len(layers) for layers in self.ranges)


def write_imported(
    directory: BuildDirectory,
    plan: Plan,
    cache: Cache,
    share: Share,
    config_digest: str,
    full_mlir: bool,
) -> PartitionManifest:
    """Writes the MLIR of the wanted partitions from the cache, then graph, plan and manifest."""
    numbers = [
        n for n, p in enumerate(plan.partitions) if set(share.owners[p.name]) & set(share.ranks)
    ]
    keys = plan.objects(tuple(plan.partitions[n] for n in numbers))
    compiled = _compiled_before(directory, config_digest)
    objects = {key: _write_code(directory, cache, key, compiled.get(key)) for key in keys}
    folders = {key: entry.name for key, entry in objects.items()}
    entries = [_write_entry(directory, plan, number, folders, share) for number in numbers]
    phases: dict[str, str | None] = dict.fromkeys(PHASES)
    phase_hashes = {}
    if full_mlir:
        for phase in PHASES:
            phases[phase] = file = f"{forward_name(phase)}.mlir"
            phase_hashes[phase] = _write_mlir(directory, file, emit_forward(plan, numbers, phase))
    manifest = PartitionManifest(
        config=config_digest,
        made_with=plan.made_with,
        variant=plan.variant,
        strategy=plan.strategy,
        sharing=plan.sharing,
        world=len(share.ranges),
        ranks=share.ranks,
        split=share.split,
        counts={
            "layers": plan.layers,
            **{phase: len(entries) for phase in PHASES},
            "templates": len({entry.template for entry in entries}),
            "objects": len(objects),
        },
        phases=phases,
        phase_hashes=phase_hashes,
        shared_by_phases=_SHARED,
        partitions=tuple(entries),
        objects=tuple(objects.values()),
    )
    directory.write(directory.graph, cache.graph_path(plan.key).read_bytes())
    directory.write(directory.plan, cache.plan_path(plan.key).read_bytes())
    directory.write(directory.manifest, manifest.to_json().encode())
    return manifest


def _write_code(
    directory: BuildDirectory, cache: Cache, key: str, compiled: ObjectEntry | None
) -> ObjectEntry:
    """Writes the MLIR of one object; its entry, which is that of the object compiled before if that
    was made of the same."""
    source = read_source(cache.source_folder(key))
    source.write(directory.mlir / source.name, directory.write)
    hashes = source_hashes(source)
    if compiled is not None and compiled.mlir == hashes:
        return compiled
    return ObjectEntry(source.name, key, source.symbols, hashes)


def _write_entry(
    directory: BuildDirectory, plan: Plan, number: int, folders: Mapping[str, str], share: Share
) -> Entry:
    """Writes a partition's entry for each phase; `folders` has those of the code, by object key."""
    partition = plan.partitions[number]
    folder = folders[plan.templates[partition.template].objects[0]]
    files, hashes = {}, {}
    for phase in PHASES:
        files[phase] = f"{subgraph_name(number, phase)}.mlir"
        text = emit_subgraph(plan, number, phase, f"{folder}/{folder}.mlir")
        hashes[phase] = _write_mlir(directory, files[phase], text)
    return Entry(
        number=number,
        name=partition.name,
        unit=partition.unit,
        owner_ranks=share.owners[partition.name],
        template=partition.template,
        source=folder,
        inputs=partition.inputs,
        outputs=partition.outputs,
        files=files,
        hashes=hashes,
    )


def _write_mlir(directory: BuildDirectory, name: str, text: str) -> str:
    """Writes a file below mlir/; its SHA-256."""
    directory.write(directory.mlir / name, text.encode())
    return hashlib.sha256(text.encode()).hexdigest()


def _compiled_before(directory: BuildDirectory, config_digest: str) -> dict[str, ObjectEntry]:
    """The compiled objects of an import that is replaced, by key: they serve on where code and
    configuration are the same."""
    try:
        manifest = directory.read_manifest()
    except UserError:
        return {}
    if manifest.config != config_digest:
        return {}
    return {entry.key: entry for entry in manifest.objects if entry.file is not None}
