"""The commands on what was built: their options to settings."""

from pathlib import Path
from typing import Annotated

import typer

from buddy_pipeline.launcher import build_options, options
from buddy_pipeline.launcher.decided import check_undecided
from buddy_pipeline.launcher.paths import path
from buddy_pipeline.launcher.settings import PartitionSettings, VerifySettings
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import parse_split
from buddy_pipeline.ranks.mpi_launcher import is_bystander


def add_built_commands(app: typer.Typer) -> None:
    """Adds verify, run-partition, pack and inspect."""
    app.command("verify", help="Checks that a split covers the model's whole graph, in order.")(
        verify
    )
    app.command("run-partition", help="Runs one partition alone, on saved or random values.")(
        run_partition
    )
    app.command("pack", help="Writes one file a rank that runs without compiler and model.")(pack)
    app.command("inspect", help="Shows a build directory, a file from one, or a bundle.")(inspect)


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
