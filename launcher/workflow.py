"""The build commands: configuration, import, compile, and all of them; see `stages` for what each
does.

Under `mpirun` the ranks are teams that each build one directory together.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.cache import Cache, write_atomically
from buddy_pipeline.compile.granularity import Sharing
from buddy_pipeline.compile.object_builder import ObjectBuilder
from buddy_pipeline.compile.partition_manifest import PartitionManifest
from buddy_pipeline.compile.service import CutGraph
from buddy_pipeline.launcher.build_config import (
    BuildConfig,
    load_config,
    load_imported_config,
    resolve_config,
)
from buddy_pipeline.launcher.build_lines import (
    compiled_line,
    imported_line,
    object_line,
    weights_line,
)
from buddy_pipeline.launcher.build_team import BuildTeam, build_world, form_team, team_folder
from buddy_pipeline.launcher.building import default_jobs
from buddy_pipeline.launcher.paths import check_writable
from buddy_pipeline.launcher.settings import BuildSettings, ImportSettings, StageSettings
from buddy_pipeline.launcher.stages import (
    BuiltBy,
    Imported,
    Owners,
    begin_weights,
    compile_share,
    deal_objects,
    finish_compile,
    finish_weights,
    import_in_team,
)
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import layer_ranges
from buddy_pipeline.ranks.faults import together
from buddy_pipeline.ranks.weight_files import Exported
from buddy_pipeline.ranks.world import World


def gen_config_command(settings: BuildSettings, output: Path) -> int:
    """Writes the resolved configuration."""
    config = resolve_config(settings)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, config.to_json().encode())
    except OSError as error:
        raise UserError(
            f"--output {output} cannot be written ({error.strerror}): give a file in a folder,"
            " such as build/config.json"
        ) from None
    target = config.target
    print(
        f"{output}: {config.family}, {counted(config.layers, 'layer')}, {config.variant},"
        f" {config.granularity.strategy}, {target.cpu} ({target.triple})"
    )
    return 0


def import_command(path: Path, stage: StageSettings, settings: ImportSettings) -> int:
    """Exports the model and writes the MLIR of one rank's partitions, or all."""
    with build_world("import", settings.rank) as world:
        settings = together(world, lambda: _in_world(settings, world))
        config, directory, cache = together(world, lambda: _opened(path, stage))
        team = form_team(world, directory, cache, config.digest())
        ranks = _imported_ranks(settings, team)
        imported, _ = together(
            world, lambda: import_in_team(directory, config, cache, settings, ranks, team)
        )
        weights = _export_weights(directory, config, settings, team)
        if imported is not None:
            print(imported_line(imported))
            if weights is not None:
                print(f"  {weights_line(weights)}")
            print(f"  {directory.manifest}")
    return 0


def _export_weights(
    directory: BuildDirectory, config: BuildConfig, settings: ImportSettings, team: BuildTeam
) -> Exported | None:
    """The weights of an import, on all ranks; on the leader what was done, if they are wanted."""
    if not settings.weights:
        return None
    export, hashes = together(team.world, lambda: begin_weights(directory, config, settings, team))
    return together(team.world, lambda: finish_weights(export, hashes, team))


def compile_directory_command(
    path: Path, stage: StageSettings, sharing: Sharing | None, time_report: Path | None
) -> int:
    """Compiles what an import has written; `sharing` imports anew if it was another."""
    _check_report(time_report)
    with build_world("compile") as world:
        config, directory, cache = together(world, lambda: _opened(path, stage))
        team = form_team(world, directory, cache, config.digest())
        manifest = together(world, directory.read_manifest)
        where = path
        if sharing is not None and sharing.value != manifest.sharing:
            granularity = replace(config.granularity, sharing=sharing)
            config = replace(config, granularity=granularity)
            again = _same_import(manifest)
            ranks = manifest.ranks
            together(world, lambda: import_in_team(directory, config, cache, again, ranks, team))
            where = directory.config
        together(world, lambda: load_imported_config(directory, where))
        started = time.perf_counter()
        with ObjectBuilder(config.target, cache, _jobs(stage, world)) as builder:
            owners = together(
                world, lambda: team.share(lambda: deal_objects(directory, team), Owners)
            )
            assert owners is not None  # else the leader has ended all
            share = together(
                world, lambda: compile_share(directory, config, cache, builder, team, owners)
            )
        built = together(world, lambda: finish_compile(directory, team, share))
        seconds = time.perf_counter() - started
        if team.leads:
            for each in built:
                print(f"  {object_line(each.built)}")
            print(compiled_line([each.built for each in built], seconds))
            if time_report is not None and world.rank == 0:
                _write_report(time_report, {"compile": seconds}, built)
    return 0


def build_command(
    settings: BuildSettings,
    stage: StageSettings,
    imports: ImportSettings,
    time_report: Path | None,
) -> int:
    """All stages: configuration, export, import, structural check, weights, compile."""
    started = time.perf_counter()
    _check_report(time_report)
    with build_world("build", imports.rank) as world:
        imports = together(world, lambda: _in_world(imports, world))
        config = together(world, lambda: resolve_config(settings))
        root = stage.build_dir or Path("build") / Path(config.spec).stem
        directory = BuildDirectory(team_folder(world, root, config.target))
        cache = together(world, lambda: Cache.open(stage.cache_dir))
        team = form_team(world, directory, cache, config.digest())
        together(world, directory.create)
        with ObjectBuilder(config.target, cache, _jobs(stage, world)) as builder:
            stages, built = _build(directory, config, cache, imports, team, builder)
        seconds = time.perf_counter() - started
        if team.leads:
            print(f"  {seconds:.2f} s in all")
            if time_report is not None and world.rank == 0:
                _write_report(time_report, {**stages, "total": seconds}, built)
    return 0


def _build(
    directory: BuildDirectory,
    config: BuildConfig,
    cache: Cache,
    imports: ImportSettings,
    team: BuildTeam,
    builder: ObjectBuilder,
) -> tuple[dict[str, float], list[BuiltBy]]:
    """The stages after the configuration; on the leader their seconds, and the objects.

    Objects are begun while the model is still being imported: `compile` is what is left after it.
    """
    world = team.world
    ranks = _imported_ranks(imports, team)
    imported, owners = together(
        world, lambda: import_in_team(directory, config, cache, imports, ranks, team, builder)
    )
    if imported is not None:
        layers = counted(config.layers, "layer")
        print(f"{directory.root}: {config.family}, {layers}, for {config.target.cpu}")
        print(f"  {imported_line(imported)}")
    weights = _export_weights(directory, config, imports, team)
    if weights is not None:
        print(f"  {weights_line(weights)}")
    verified = time.perf_counter()
    if imported is not None:
        _verify(directory, config, imports, imported)
    compiling = time.perf_counter()
    share = together(world, lambda: compile_share(directory, config, cache, builder, team, owners))
    built = together(world, lambda: finish_compile(directory, team, share))
    now = time.perf_counter()
    if imported is None:
        return {}, []
    print(f"  {compiled_line([each.built for each in built], now - compiling)}")
    times = imported.times
    stages = {
        "packages": times.packages,
        "export": times.export,
        "import": times.imports,
        "files": imported.writing,
        "weights": weights.seconds if weights else 0.0,
        "verify": compiling - verified,
        "compile": now - compiling,
    }
    return stages, built


def _verify(
    directory: BuildDirectory, config: BuildConfig, imports: ImportSettings, imported: Imported
) -> None:
    """The structural check of what was imported; a cut that loses nodes is our own fault."""
    assert imports.world is not None
    started = time.perf_counter()
    ranges = layer_ranges(imported.plan.layers, imports.world, imports.split)
    report = CutGraph.read(imported.plan, config.family, directory.graph).verify(ranges)
    if not report.ok:
        raise RuntimeError(f"the cut of the graph is wrong: {report.violations[0].message}")
    print(
        f"  verified {counted(report.compute_nodes, 'node')} in"
        f" {counted(report.partitions, 'partition')}: {time.perf_counter() - started:.2f} s"
    )


def _opened(path: Path, stage: StageSettings) -> tuple[BuildConfig, BuildDirectory, Cache]:
    """The configuration at `path`, and where a stage works on it."""
    from buddy_pipeline.compile.custom_target import check_known

    directory = BuildDirectory(stage.build_dir or path.parent)
    config = load_config(path)
    try:
        check_known(config.target)
    except UserError as error:
        raise UserError(f"--config {path}: {error}") from None
    return config, directory, Cache.open(stage.cache_dir)


def _in_world(settings: ImportSettings, world: World) -> ImportSettings:
    """The settings for the ranks that there are; UserError where they say otherwise."""
    started = world.world if world.comm is not None else None
    if started is not None and settings.world not in (None, started):
        raise UserError(
            f"--world {settings.world} is not the {started} ranks that were started: leave it out,"
            " or start one process"
        )
    settings = replace(settings, world=started or settings.world or 1)
    assert settings.world is not None
    if settings.rank is not None and settings.rank >= settings.world:
        raise UserError(
            f"--rank {settings.rank} does not exist in a world of {settings.world}:"
            f" use a rank from 0 to {settings.world - 1}"
        )
    return settings


def _imported_ranks(settings: ImportSettings, team: BuildTeam) -> Sequence[int]:
    """Whose partitions an import writes: the team's or, of a process alone, those it is told."""
    assert settings.world is not None
    if team.world.comm is not None:
        return team.ranks
    return range(settings.world) if settings.rank is None else (settings.rank,)


def _jobs(stage: StageSettings, world: World) -> int:
    """Compiler processes of this rank at a time."""
    return stage.jobs or max(1, default_jobs() // world.local_size)


def _same_import(manifest: PartitionManifest) -> ImportSettings:
    """The settings that a manifest was imported with."""
    return ImportSettings(
        rank=None if len(manifest.ranks) == manifest.world else manifest.ranks[0],
        world=manifest.world,
        split=manifest.split,
        full_mlir=any(manifest.phases.values()),
        weights=False,
        reuse_weights=True,
        direct_weights=True,
        debug_wrappers=False,
    )


def _check_report(path: Path | None) -> None:
    if path is not None:
        check_writable("--time-report", path)


def _write_report(path: Path, stages: dict[str, float], built: Sequence[BuiltBy]) -> None:
    objects = [{**asdict(item.built), "rank": item.rank} for item in built]
    report = {"seconds": stages, "objects": objects}
    write_atomically(path, (json.dumps(report, indent=1) + "\n").encode())
    print(f"  times in {path}", file=sys.stderr)
