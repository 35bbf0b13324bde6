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
from buddy_pipeline.compile.source import Source, read_source
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
    wanted = tuple(plan.partitions[n] for n in numbers)
    compiled = _compiled_before(directory, config_digest)
    objects: list[ObjectEntry] = []
    for key in plan.objects(wanted):
        source = read_source(cache.source_folder(key))
        source.write(directory.mlir / source.name, directory.write)
        entry = _object_entry(key, source)
        old = compiled.get(key)
        objects.append(old if old is not None and old.mlir == entry.mlir else entry)
    folders = {entry.key: entry.name for entry in objects}

    entries = []
    for number, partition in zip(numbers, wanted, strict=True):
        template = plan.templates[partition.template]
        folder = folders[template.objects[0]]
        files, hashes = {}, {}
        for phase in PHASES:
            files[phase] = f"{subgraph_name(number, phase)}.mlir"
            text = emit_subgraph(plan, number, phase, f"{folder}/{folder}.mlir").encode()
            directory.write(directory.mlir / files[phase], text)
            hashes[phase] = hashlib.sha256(text).hexdigest()
        owners = share.owners[partition.name]
        entries.append(
            Entry(
                number,
                partition.name,
                partition.unit,
                owners,
                partition.template,
                folder,
                partition.inputs,
                partition.outputs,
                files,
                hashes,
            )
        )
    combined: dict[str, str | None] = dict.fromkeys(PHASES)
    combined_hashes = {}
    if full_mlir:
        for phase in PHASES:
            combined[phase] = file = f"{forward_name(phase)}.mlir"
            text = emit_forward(plan, numbers, phase).encode()
            directory.write(directory.mlir / file, text)
            combined_hashes[phase] = hashlib.sha256(text).hexdigest()

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
        phases=combined,
        phase_hashes=combined_hashes,
        shared_by_phases=_SHARED,
        partitions=tuple(entries),
        objects=tuple(objects),
    )
    directory.write(directory.graph, cache.graph_path(plan.key).read_bytes())
    directory.write(directory.plan, cache.plan_path(plan.key).read_bytes())
    directory.write(directory.manifest, manifest.to_json().encode())
    return manifest


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


def _object_entry(key: str, source: Source) -> ObjectEntry:
    return ObjectEntry(source.name, key, source.symbols, source_hashes(source))
