"""The stages of a build, each usable alone: configuration, import, compile; and all of them.

Each reads what the one before has left in the build directory, or makes it from the cache.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.cache import Cache, write_atomically
from buddy_pipeline.compile.compiled_files import current_keys, write_objects
from buddy_pipeline.compile.debug_wrappers import write_wrappers
from buddy_pipeline.compile.granularity import Granularity, Sharing
from buddy_pipeline.compile.imported_files import Share, write_imported
from buddy_pipeline.compile.manifest import Plan, runs_unit
from buddy_pipeline.compile.object_builder import Built, ObjectBuilder
from buddy_pipeline.compile.partition_manifest import PartitionManifest
from buddy_pipeline.compile.service import Ahead, PlanTimes, ensure_plan, verify_split
from buddy_pipeline.compile.worker_process import CompileError
from buddy_pipeline.launcher.build_config import (
    BuildConfig,
    load_config,
    load_imported_config,
    resolve_config,
)
from buddy_pipeline.launcher.building import default_jobs
from buddy_pipeline.launcher.paths import check_writable
from buddy_pipeline.launcher.settings import BuildSettings, ImportSettings, StageSettings
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import block_role, layer_ranges
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.weight_files import Exported, export_weights


@dataclass(frozen=True)
class Imported:
    """What the import stage did."""

    manifest: PartitionManifest
    plan: Plan
    times: PlanTimes
    writing: float
    """Seconds for the files, without weights."""
    weights: Exported | None


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
        f"{output}: {config.family}, {config.layers} layers, {config.variant},"
        f" {config.granularity.strategy}, {target.cpu} ({target.triple})"
    )
    return 0


def import_command(path: Path, stage: StageSettings, settings: ImportSettings) -> int:
    """Exports the model and writes the MLIR of one rank's partitions, or all."""
    config = load_config(path)
    directory = BuildDirectory(stage.build_dir or path.parent)
    cache = Cache.open(stage.cache_dir)
    imported = import_model(directory, config, cache, settings)
    print(_imported_line(imported))
    print(f"  {directory.manifest}")
    return 0


def import_model(
    directory: BuildDirectory,
    config: BuildConfig,
    cache: Cache,
    settings: ImportSettings,
    builder: ObjectBuilder | None = None,
) -> Imported:
    """The import stage; `builder` begins objects as soon as their MLIR is there."""
    ranges = layer_ranges(config.layers, settings.world, settings.split)
    if settings.rank is not None and settings.rank >= settings.world:
        raise UserError(
            f"--rank {settings.rank} does not exist in a world of {settings.world}:"
            f" use a rank from 0 to {settings.world - 1}"
        )
    ranks = range(settings.world) if settings.rank is None else (settings.rank,)

    def wanted(unit: str) -> bool:
        roles = ((ranges[rank], block_role(rank, settings.world)) for rank in ranks)
        return any(runs_unit(unit, layers, role) for layers, role in roles)

    plan, times = ensure_plan(
        config.model,
        config.formats,
        config.target,
        cache,
        config.granularity,
        with_mlir=True,
        ahead=None if builder is None else Ahead(builder, wanted),
    )
    if plan.layers != config.layers:
        raise UserError(
            f"the configuration has {config.layers} layers, but its model's graph {plan.layers}:"
            " run 'buddy-pipeline gen-config' again"
        )
    started = time.perf_counter()
    share = Share.of(plan, ranges, ranks)
    directory.create()
    manifest = write_imported(directory, plan, cache, share, config.digest(), settings.full_mlir)
    if settings.debug_wrappers:
        write_wrappers(directory, plan, manifest)
    directory.write(directory.config, config.to_json().encode())
    writing = time.perf_counter() - started
    weights = None
    if settings.weights:
        weights = export_weights(
            directory.weights,
            [plan.partitions[entry.number] for entry in manifest.partitions],
            open_checkpoint(Path(config.model_path)),
            config.variant,
            direct=settings.direct_weights,
            reuse=settings.reuse_weights,
        )
    return Imported(manifest, plan, times, writing, weights)


def compile_directory_command(
    path: Path, stage: StageSettings, sharing: Sharing | None, time_report: Path | None
) -> int:
    """Compiles what an import has written; `sharing` imports anew if it was another."""
    _check_report(time_report)
    config = load_config(path)
    directory = BuildDirectory(stage.build_dir or path.parent)
    cache = Cache.open(stage.cache_dir)
    manifest = directory.read_manifest()
    if sharing is not None and sharing.value != manifest.sharing:
        config = _with_sharing(config, sharing)
        manifest = import_model(directory, config, cache, _same_import(manifest)).manifest
        path = directory.config
    load_imported_config(directory, path)
    started = time.perf_counter()
    with ObjectBuilder(config.target, cache, stage.jobs or default_jobs()) as builder:
        built = compile_directory(directory, manifest, config, cache, builder)
    seconds = time.perf_counter() - started
    _print_objects(built)
    print(_compiled_line(built, seconds))
    if time_report is not None:
        _write_report(time_report, {"compile": seconds}, built)
    return 0


def compile_directory(
    directory: BuildDirectory,
    manifest: PartitionManifest,
    config: BuildConfig,
    cache: Cache,
    builder: ObjectBuilder,
) -> list[Built]:
    """The compile stage: objects for all MLIR of the directory, edited by hand or not."""
    plan = directory.read_plan()
    keys = current_keys(directory, manifest, config.target, cache)
    edited = {
        keys[entry.key]: directory.mlir / entry.name
        for entry in manifest.objects
        if keys[entry.key] != entry.key
    }
    for folder in edited.values():
        print(f"  {folder} was edited: compiled as it is now")
    wanted = list(dict.fromkeys(keys.values()))
    try:
        built = builder.finish(wanted)
    except CompileError as error:
        if error.key in edited:
            raise UserError(
                f"{edited[error.key]} was edited and does not compile: {error}"
            ) from None
        raise
    write_objects(directory, manifest, plan, keys, cache)
    return built


def build_command(
    settings: BuildSettings,
    stage: StageSettings,
    imports: ImportSettings,
    time_report: Path | None,
) -> int:
    """All stages: configuration, export, import, structural check, weights, compile."""
    started = time.perf_counter()
    _check_report(time_report)
    config = resolve_config(settings)
    directory = BuildDirectory(stage.build_dir or Path("build") / Path(config.spec).stem)
    cache = Cache.open(stage.cache_dir)
    directory.create()
    with ObjectBuilder(config.target, cache, stage.jobs or default_jobs()) as builder:
        stages, built = _build(directory, config, cache, imports, builder)
    seconds = time.perf_counter() - started
    print(f"  {seconds:.2f} s in all")
    if time_report is not None:
        _write_report(time_report, {**stages, "total": seconds}, built)
    return 0


def _build(
    directory: BuildDirectory,
    config: BuildConfig,
    cache: Cache,
    imports: ImportSettings,
    builder: ObjectBuilder,
) -> tuple[dict[str, float], list[Built]]:
    """The stages after the configuration; their seconds, and the objects.

    Objects are begun while the model is still being imported: `compile` is what is left after it.
    """
    imported = import_model(directory, config, cache, imports, builder)
    print(f"{directory.root}: {config.family}, {config.layers} layers, for {config.target.cpu}")
    print(f"  {_imported_line(imported)}")
    verified = time.perf_counter()
    ranges = layer_ranges(imported.plan.layers, imports.world, imports.split)
    report = verify_split(imported.plan, config.family, ranges, cache)
    if not report.ok:
        raise UserError(f"the cut of the graph is wrong: {report.violations[0].message}")
    compiling = time.perf_counter()
    print(
        f"  verified {report.compute_nodes} nodes in {report.partitions} partitions:"
        f" {compiling - verified:.2f} s"
    )
    built = compile_directory(directory, imported.manifest, config, cache, builder)
    now = time.perf_counter()
    print(f"  {_compiled_line(built, now - compiling)}")
    times = imported.times
    stages = {
        "packages": times.packages,
        "export": times.export,
        "import": times.imports,
        "files": imported.writing,
        "weights": imported.weights.seconds if imported.weights else 0.0,
        "verify": compiling - verified,
        "compile": now - compiling,
    }
    return stages, built


def _with_sharing(config: BuildConfig, sharing: Sharing) -> BuildConfig:
    granularity = Granularity(config.granularity.strategy, sharing)
    return BuildConfig(**{**vars(config), "granularity": granularity})


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


def _imported_line(imported: Imported) -> str:
    times, counts = imported.times, imported.manifest.counts
    how = (
        f"exported in {times.export:.2f} s and imported in {times.imports:.2f} s"
        f" ({times.total:.2f} s with starting the compilers)"
        if times.total
        else "plan from the cache"
    )
    line = (
        f"{how}: {counts['prefill']} prefill and {counts['decode']} decode partitions of"
        f" {counts['templates']} templates; files in {imported.writing:.2f} s"
    )
    if imported.weights is not None:
        done = imported.weights
        line += (
            f"; {done.bytes / 1e6:.0f} MB of weights, {len(done.written)} files written and"
            f" {len(done.reused)} reused in {done.seconds:.2f} s"
        )
    return line


def _print_objects(built: Sequence[Built]) -> None:
    for item in built:
        how = "from the cache" if item.from_cache else f"built in {item.seconds:.2f} s"
        print(f"  {item.name}: {how}")


def _compiled_line(built: Sequence[Built], seconds: float) -> str:
    fresh = sum(not item.from_cache for item in built)
    return f"{fresh} objects built, {len(built) - fresh} from the cache: {seconds:.2f} s"


def _check_report(path: Path | None) -> None:
    if path is not None:
        check_writable("--time-report", path)


def _write_report(path: Path, stages: dict[str, float], built: Sequence[Built]) -> None:
    report = {"seconds": stages, "objects": [asdict(item) for item in built]}
    write_atomically(path, (json.dumps(report, indent=1) + "\n").encode())
    print(f"  times in {path}", file=sys.stderr)
