"""The commands that build: their options to settings; see `workflow` for what they do."""

import typer

from buddy_pipeline.launcher import build_options, options
from buddy_pipeline.launcher.settings import (
    BuildSettings,
    CompileSettings,
    ImportSettings,
    StageSettings,
)
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import parse_split
from buddy_pipeline.ranks.mpi_launcher import detect_launcher, is_bystander


def add_build_commands(app: typer.Typer) -> None:
    """Adds gen-config, import, compile and build."""
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
        raise UserError(
            "compile needs --spec, or --config with the configuration of a build directory: "
            "give one of them"
        )
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
