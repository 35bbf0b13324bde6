"""The commands that build: their options to settings; see `workflow` for what they do."""

from pathlib import Path
from typing import Annotated

import typer

from buddy_pipeline.launcher import build_options, options
from buddy_pipeline.launcher.decided import check_undecided
from buddy_pipeline.launcher.paths import path
from buddy_pipeline.launcher.settings import (
    BuildSettings,
    CompileSettings,
    ImportSettings,
    PartitionSettings,
    StageSettings,
    VerifySettings,
)
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import parse_split
from buddy_pipeline.ranks.mpi_launcher import detect_launcher, is_bystander


def add_build_commands(app: typer.Typer) -> None:
    """Adds gen-config, import, compile, build, verify, run-partition, pack and inspect."""
    app.command("gen-config", help="Writes down everything that a spec leaves to be found out.")(
        gen_config
    )
    app.command("import", help="Exports the model and writes the MLIR of its partitions.")(
        import_model
    )
    app.command("compile", help="Compiles what one rank needs, or the MLIR of a build directory.")(
        compile_model
    )
    app.command("build", help="All stages in one: configuration, import, check, compile.")(build)
    app.command("verify", help="Checks that a split covers the model's whole graph, in order.")(
        verify
    )
    app.command("run-partition", help="Runs one partition alone, on saved or random values.")(
        run_partition
    )
    app.command("pack", help="Writes one file a rank that runs without compiler and model.")(pack)
    app.command("inspect", help="Shows a build directory, manifest, object or weight file.")(
        inspect
    )


def gen_config(
    *,
    spec: options.Spec,
    output: build_options.Output,
    variant: options.Variant = None,
    exact: options.Exact = False,
    kv_cache_dtype: options.KvCacheDtype = None,
    local_model: options.LocalModel = None,
    strategy: build_options.Strategy = "coarse",
    whole_graph: build_options.WholeGraph = False,
    target_triple: build_options.TargetTriple = None,
    target_cpu: options.TargetCpu = None,
    target_features: build_options.TargetFeatures = None,
) -> int:
    """Resolves a spec; reads no weights and needs no compiler."""
    settings = BuildSettings(
        spec=spec,
        variant=variant,
        exact=exact,
        kv_cache_dtype=kv_cache_dtype,
        local_model=local_model,
        strategy=strategy,
        whole_graph=whole_graph,
        target_triple=target_triple,
        target_cpu=target_cpu,
        target_features=target_features,
    )
    if is_bystander():
        return 0
    from buddy_pipeline.launcher.workflow import gen_config_command

    return gen_config_command(settings, output)


def import_model(
    *,
    config: build_options.Config,
    build_dir: build_options.BuildDir = None,
    rank: build_options.OptionalRank = None,
    world: build_options.OptionalWorld = None,
    split: options.Split = None,
    skip_full_mlir: build_options.SkipFullMlir = False,
    skip_weights: build_options.SkipWeights = False,
    reuse_weights: build_options.ReuseWeights = True,
    direct_weight_export: build_options.DirectWeights = True,
    debug_wrappers: build_options.DebugWrappers = False,
    cache_dir: options.CacheDir = None,
) -> int:
    """Writes MLIR, manifest and packed weights of one rank, or of all."""
    settings = ImportSettings(
        rank=rank,
        world=world,
        split=None if split is None else parse_split(split),
        full_mlir=not skip_full_mlir,
        weights=not skip_weights,
        reuse_weights=reuse_weights,
        direct_weights=direct_weight_export,
        debug_wrappers=debug_wrappers,
    )
    from buddy_pipeline.launcher.workflow import import_command

    return import_command(config, StageSettings(build_dir, cache_dir, None), settings)


def compile_model(
    *,
    spec: build_options.OptionalSpec = None,
    config: build_options.OptionalConfig = None,
    build_dir: build_options.BuildDir = None,
    whole_graph: build_options.Sharing = None,
    time_report: build_options.TimeReport = None,
    rank: build_options.CompiledRank = None,
    world: build_options.OptionalWorld = None,
    variant: options.Variant = None,
    exact: options.Exact = False,
    kv_cache_dtype: options.KvCacheDtype = None,
    local_model: options.LocalModel = None,
    split: options.Split = None,
    cache_dir: options.CacheDir = None,
    jobs: options.Jobs = None,
    target_cpu: options.TargetCpu = None,
) -> int:
    """Fills the object cache for one rank of a spec, or compiles a build directory."""
    if (spec is None) == (config is None):
        raise UserError("compile needs --spec, or --config of a build directory: give one of them")
    if config is not None:
        from buddy_pipeline.compile.granularity import Sharing
        from buddy_pipeline.launcher.workflow import compile_directory_command

        sharing = {None: None, True: Sharing.WHOLE_GRAPH, False: Sharing.TEMPLATES}[whole_graph]
        stage = StageSettings(build_dir, cache_dir, jobs)
        return compile_directory_command(config, stage, sharing, time_report)
    assert spec is not None
    started = detect_launcher()
    if rank is None:
        rank = 0 if started is None else started.rank
    if world is None:
        world = 1 if started is None or started.size is None else started.size
    settings = CompileSettings(
        spec=spec,
        variant=variant,
        exact=exact,
        kv_cache_dtype=kv_cache_dtype,
        local_model=local_model,
        rank=rank,
        world=world,
        split=None if split is None else parse_split(split),
        jobs=jobs,
        target_cpu=target_cpu,
        cache_dir=cache_dir,
    )
    from buddy_pipeline.launcher.building import compile_command

    return compile_command(settings)


def build(
    *,
    spec: options.Spec,
    build_dir: build_options.NewBuildDir = None,
    variant: options.Variant = None,
    exact: options.Exact = False,
    kv_cache_dtype: options.KvCacheDtype = None,
    local_model: options.LocalModel = None,
    strategy: build_options.Strategy = "coarse",
    whole_graph: build_options.WholeGraph = False,
    target_triple: build_options.TargetTriple = None,
    target_cpu: options.TargetCpu = None,
    target_features: build_options.TargetFeatures = None,
    rank: build_options.OptionalRank = None,
    world: build_options.OptionalWorld = None,
    split: options.Split = None,
    skip_full_mlir: build_options.SkipFullMlir = False,
    skip_weights: build_options.SkipWeights = False,
    reuse_weights: build_options.ReuseWeights = True,
    direct_weight_export: build_options.DirectWeights = True,
    debug_wrappers: build_options.DebugWrappers = False,
    cache_dir: options.CacheDir = None,
    jobs: options.Jobs = None,
    time_report: build_options.TimeReport = None,
) -> int:
    """Builds a directory from a spec."""
    settings = BuildSettings(
        spec=spec,
        variant=variant,
        exact=exact,
        kv_cache_dtype=kv_cache_dtype,
        local_model=local_model,
        strategy=strategy,
        whole_graph=whole_graph,
        target_triple=target_triple,
        target_cpu=target_cpu,
        target_features=target_features,
    )
    imports = ImportSettings(
        rank=rank,
        world=world,
        split=None if split is None else parse_split(split),
        full_mlir=not skip_full_mlir,
        weights=not skip_weights,
        reuse_weights=reuse_weights,
        direct_weights=direct_weight_export,
        debug_wrappers=debug_wrappers,
    )
    from buddy_pipeline.launcher.workflow import build_command

    stage = StageSettings(build_dir, cache_dir, jobs)
    return build_command(settings, stage, imports, time_report)


def verify(
    *,
    spec: build_options.OptionalSpec = None,
    build_dir: build_options.VerifiedDir = None,
    world: build_options.OptionalWorld = None,
    variant: options.Variant = None,
    exact: options.Exact = False,
    kv_cache_dtype: options.KvCacheDtype = None,
    local_model: options.LocalModel = None,
    split: options.Split = None,
    strategy: build_options.OptionalStrategy = None,
    numeric: build_options.Numeric = False,
    prompt: build_options.NumericPrompts = None,
    report: options.Report = None,
    cache_dir: options.CacheDir = None,
) -> int:
    """Compares the partitions of all ranks with the exported graph, and logits if asked to."""
    if prompt and not numeric:
        raise UserError("--prompt is for the numeric check: add --numeric")
    if (spec is None) == (build_dir is None):
        raise UserError("verify needs --spec or --build-dir: give one of them")
    if build_dir is not None:
        decided = {"--world": world, "--split": split, "--strategy": strategy}
        decided |= {"--variant": variant, "--exact": exact, "--kv-cache-dtype": kv_cache_dtype}
        check_undecided(decided, "--build-dir", build_dir)
    settings = VerifySettings(
        spec=spec or "",
        build_dir=build_dir,
        variant=variant,
        exact=exact,
        kv_cache_dtype=kv_cache_dtype,
        local_model=local_model,
        world=world or 1,
        split=None if split is None else parse_split(split),
        strategy=strategy or "coarse",
        numeric=tuple(prompt or (_PROMPT,)) if numeric else (),
        report=report,
        cache_dir=cache_dir,
    )
    if is_bystander():
        return 0
    from buddy_pipeline.launcher.verifying import verify_command

    return verify_command(settings)


#: What the numeric check runs where no prompt is given.
_PROMPT = "The layers of a pipeline are dealt out to ranks, and each computes its own."


def run_partition(
    build_dir: Annotated[Path, typer.Argument(metavar="BUILD_DIR", parser=path)],
    partition: Annotated[str | None, typer.Argument(metavar="PARTITION")] = None,
    *,
    output: build_options.ValuesOutput,
    inputs: build_options.ValuesInputs = None,
    random: build_options.RandomValues = None,
    tokens: build_options.Tokens = None,
    step: build_options.Step = None,
    threads: options.Threads = None,
) -> int:
    """Runs a partition of a compiled build directory, or all of them one after the other."""
    settings = PartitionSettings(
        build_dir=build_dir,
        partition=partition,
        inputs=tuple(inputs or ()),
        random=random,
        tokens=tokens,
        step=step,
        threads=threads,
        output=output,
    )
    if is_bystander():
        return 0
    from buddy_pipeline.launcher.lone_partition import run_partition_command

    return run_partition_command(settings)


def pack(
    *,
    build_dir: Annotated[Path, options._path("Build", "The compiled build directory.")],
    output: build_options.OutputFolder,
    rank: build_options.OptionalRank = None,
    weights: build_options.PackedWeights = True,
) -> int:
    """Packs one rank of a build directory, or all."""
    if is_bystander():
        return 0
    from buddy_pipeline.launcher.packing import pack_command

    return pack_command(build_dir, output, rank, weights)


def inspect(
    where: Annotated[Path, typer.Argument(metavar="PATH", parser=path)],
    *,
    as_json: build_options.AsJson = False,
    verify: build_options.VerifyAll = False,
) -> int:
    """Shows what lies at a path."""
    if is_bystander():
        return 0
    from buddy_pipeline.launcher.inspecting import inspect_command

    return inspect_command(where, as_json, verify)
