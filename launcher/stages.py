"""The import and the compile stage of a build directory, by one process or a team of ranks.

Each reads what the one before has left in the directory, or makes it from the cache. Of a team the
leader exports and writes what there is one of; objects and weights are dealt out.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.compiled_files import (
    check_entry_files,
    current_key,
    write_compiled,
    write_object,
)
from buddy_pipeline.compile.dealing import Dealing
from buddy_pipeline.compile.debug_wrappers import write_wrappers
from buddy_pipeline.compile.imported_files import Share, write_imported
from buddy_pipeline.compile.manifest import Plan, runs_unit
from buddy_pipeline.compile.object_builder import Built, ObjectBuilder, source_size
from buddy_pipeline.compile.partition_manifest import ObjectEntry, PartitionManifest
from buddy_pipeline.compile.service import Ahead, PlanTimes, build_ahead, ensure_plan
from buddy_pipeline.compile.worker_process import CompileError
from buddy_pipeline.launcher.build_config import BuildConfig
from buddy_pipeline.launcher.build_team import BuildTeam
from buddy_pipeline.launcher.settings import ImportSettings
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import block_role, layer_ranges
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.weight_files import Exported, WeightExport, weight_file_name


@dataclass(frozen=True)
class Imported:
    """What the import stage wrote, besides weights."""

    manifest: PartitionManifest
    plan: Plan
    times: PlanTimes
    writing: float
    """Seconds for the files."""


@dataclass(frozen=True)
class BuiltBy:
    """An object, and the rank that built or found it."""

    rank: int
    built: Built


@dataclass(frozen=True)
class Compiled:
    """One rank's share of the compile stage: new entries of the manifest, and what was built."""

    entries: list[ObjectEntry]
    built: list[BuiltBy]


def import_files(
    directory: BuildDirectory,
    config: BuildConfig,
    cache: Cache,
    settings: ImportSettings,
    ranks: Sequence[int],
    ahead: Ahead | None = None,
) -> Imported:
    """Exports the model and writes MLIR, plan, graph and manifest of these ranks' partitions.

    `ahead` begins objects as soon as their MLIR is there.
    """
    assert settings.world is not None
    ranges = layer_ranges(config.layers, settings.world, settings.split)
    plan, times = ensure_plan(
        config.model,
        config.formats,
        config.target,
        cache,
        config.granularity,
        with_mlir=True,
        ahead=ahead,
    )
    if plan.layers != config.layers:
        raise UserError(
            f"the configuration has {counted(config.layers, 'layer')}, but its model's graph"
            f" {plan.layers}: run 'buddy-pipeline gen-config' again"
        )
    started = time.perf_counter()
    share = Share.of(plan, ranges, ranks)
    directory.create()
    manifest = write_imported(directory, plan, cache, share, config.digest(), settings.full_mlir)
    if settings.debug_wrappers:
        write_wrappers(directory, plan, manifest)
    directory.write(directory.config, config.to_json().encode())
    return Imported(manifest, plan, times, time.perf_counter() - started)


def import_in_team(
    directory: BuildDirectory,
    config: BuildConfig,
    cache: Cache,
    settings: ImportSettings,
    ranks: Sequence[int],
    team: BuildTeam,
    builder: ObjectBuilder | None = None,
) -> tuple[Imported | None, Owners]:
    """`import_files` of `ranks` on the leader, and on all whose each object is to build.

    With a `builder` the other members meanwhile build what the leader deals them.
    """
    if not team.leads:
        return None, _help(team, builder)
    dealing = Dealing(team.neighbours, busy=team.world.rank)
    owners = None
    try:
        ahead = None
        if builder is not None:
            ahead = _ahead(config, cache, settings, ranks, builder, team, dealing)
        imported = import_files(directory, config, cache, settings, ranks, ahead)
        owners = deal_objects(directory, team, dealing.owner)
    finally:
        for rank in team.others:
            team.tell(rank, owners)
    return imported, owners


Owners = dict[str, int]
"""The rank that builds an object, by the object's key in the manifest."""
#: What the leader tells the others while it plans, besides keys of objects, and owners at the end.
_START = "start"
_Heard: Any = str | dict[str, int] | None


def _ahead(
    config: BuildConfig,
    cache: Cache,
    settings: ImportSettings,
    ranks: Sequence[int],
    builder: ObjectBuilder,
    team: BuildTeam,
    dealing: Dealing,
) -> Ahead:
    """Has objects begun by this process or, in a team, by its neighbours that run them."""
    assert settings.world is not None
    world = settings.world
    ranges = layer_ranges(config.layers, world, settings.split)

    def wanting(unit: str | None) -> list[int]:
        return [
            rank
            for rank in ranks
            if unit is None or runs_unit(unit, ranges[rank], block_role(rank, world))
        ]

    if not team.others:
        return build_ahead(builder, lambda unit: bool(wanting(unit)))

    def start() -> None:
        for rank in team.neighbours:
            if rank != team.world.rank:
                team.tell(rank, _START)

    def begin(unit: str | None, keys: Sequence[str]) -> None:
        for key in keys:
            rank = dealing.deal(key, source_size(cache, key), wanting(unit))
            if rank == team.world.rank:
                builder.begin(key)
            elif rank is not None:
                team.tell(rank, key)

    return Ahead(start, begin)


def _help(team: BuildTeam, builder: ObjectBuilder | None) -> Owners:
    """Begins what the leader deals out while it plans, until it says whose all objects are."""
    while isinstance(heard := team.hear(_Heard), str):
        assert builder is not None
        if heard == _START:
            builder.start()
        else:
            builder.begin(heard)
    return heard or {}  # nothing if the leader has failed


def deal_objects(
    directory: BuildDirectory, team: BuildTeam, dealt: Owners | None = None
) -> dict[str, int]:
    """Whose each object of the directory is to build, the largest dealt first; `dealt` are so
    already.

    Raises UserError for what cannot be compiled as it is.
    """
    manifest, plan = directory.read_manifest(), directory.read_plan()
    check_entry_files(directory, manifest)
    wanting: dict[str, set[int]] = {}
    for entry in manifest.partitions:
        for key in plan.objects((plan.partitions[entry.number],)):
            wanting.setdefault(key, set()).update(entry.owner_ranks)
    sizes = {entry.key: directory.source_size(entry.name) for entry in manifest.objects}
    dealing = Dealing(team.ranks)
    for key, rank in (dealt or {}).items():
        dealing.deal(key, sizes.get(key, 0), (rank,))
    for key in sorted(sizes, key=lambda each: -sizes[each]):
        dealing.deal(key, sizes[key], _able(wanting.get(key, ()), team))
    return dealing.owner


def begin_weights(
    directory: BuildDirectory, config: BuildConfig, settings: ImportSettings, team: BuildTeam
) -> tuple[WeightExport, dict[str, str]]:
    """Packs this rank's share of the weights that an import has named; the hashes of its files."""
    manifest, plan = directory.read_manifest(), directory.read_plan()
    export = WeightExport(
        directory.weights,
        [plan.partitions[entry.number] for entry in manifest.partitions],
        open_checkpoint(Path(config.model_path)),
        config.variant,
        direct=settings.direct_weights,
        reuse=settings.reuse_weights,
    )
    owners: dict[str, set[int]] = {}
    for entry in manifest.partitions:
        owners.setdefault(weight_file_name(entry.unit), set()).update(entry.owner_ranks)
    dealing = Dealing(team.ranks)
    for name, size in export.missing.items():
        dealing.deal(name, size, _able(owners[name], team))
    mine = [name for name, rank in dealing.owner.items() if rank == team.world.rank]
    return export, export.write(mine)


def finish_weights(
    export: WeightExport, hashes: dict[str, str], team: BuildTeam
) -> Exported | None:
    """Ends the export when all ranks have packed their shares; on the leader what was done."""
    shares = team.gather(hashes, dict[str, str])
    if not team.leads:
        return None
    return export.finish({name: digest for share in shares for name, digest in share.items()})


def _able(owners: Collection[int], team: BuildTeam) -> Collection[int]:
    """The members of a team that do what is for some ranks: those themselves, else any."""
    return set(owners) & set(team.ranks) or team.ranks


def compile_share(
    directory: BuildDirectory,
    config: BuildConfig,
    cache: Cache,
    builder: ObjectBuilder,
    team: BuildTeam,
    owners: Owners,
) -> Compiled:
    """Builds this rank's share of the directory's MLIR, edited by hand or not."""
    manifest = directory.read_manifest()
    mine = [entry for entry in manifest.objects if owners[entry.key] == team.world.rank]
    keys = {
        entry.name: current_key(directory, entry, manifest.made_with, config.target, cache)
        for entry in mine
    }
    edited = {keys[e.name]: directory.mlir / e.name for e in mine if keys[e.name] != e.key}
    for folder in edited.values():
        print(f"  {folder} was edited: compiled as it is now")
    try:
        built = builder.finish(list(dict.fromkeys(keys.values())))
    except CompileError as error:
        if error.key in edited:
            raise UserError(
                f"{edited[error.key]} was edited and does not compile: {error}"
            ) from None
        raise
    entries = [write_object(directory, entry, keys[entry.name], cache) for entry in mine]
    return Compiled(entries, [BuiltBy(team.world.rank, each) for each in built])


def finish_compile(directory: BuildDirectory, team: BuildTeam, compiled: Compiled) -> list[BuiltBy]:
    """What all ranks have built, on the leader, which then writes the manifest."""
    shares = team.gather(compiled, Compiled)
    if not team.leads:
        return []
    entries = {entry.name: entry for share in shares for entry in share.entries}
    write_compiled(directory, directory.read_manifest(), directory.read_plan(), entries)
    return [built for share in shares for built in share.built]
