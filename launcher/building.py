"""Compiling what one rank needs: for a run that finds something missing, and as a command."""

import os
import sys
import time

import typer

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.manifest import PartitionPlan, Plan, runs_unit
from buddy_pipeline.compile.object_builder import Built, ObjectBuilder
from buddy_pipeline.compile.service import Ahead, build_ahead, ensure_plan, missing_objects
from buddy_pipeline.compile.target import Target, named_target
from buddy_pipeline.launcher.build_lines import compiled_line, object_line
from buddy_pipeline.launcher.model import Model, open_model
from buddy_pipeline.launcher.settings import CompileSettings
from buddy_pipeline.partition.layers import block_role, layer_ranges


def plan_model(
    model: Model, target: Target, cache: Cache, show: bool, ahead: Ahead | None = None
) -> tuple[Plan, float]:
    """The model's plan, and the seconds it took to make (0 if it was there).

    Objects that `ahead` wants are begun meanwhile.
    """
    if model.prebuilt is not None:
        return model.prebuilt.plan, 0.0
    plan, times = ensure_plan(
        model.checkpoint.config, model.formats, target, cache, model.granularity, ahead=ahead
    )
    if show and times.total:
        print(f"exported and planned the model in {times.total:.1f} s", file=sys.stderr)
    return plan, times.total


def build_objects(
    plan: Plan,
    partitions: tuple[PartitionPlan, ...],
    builder: ObjectBuilder,
    cache: Cache,
    show: bool,
) -> list[Built]:
    """All that these partitions need, built where it is missing; `show` draws a progress bar."""
    keys = plan.objects(partitions) if partitions else []
    making = {*missing_objects(keys, cache), *(builder.begun & set(keys))}
    if not show or not making:
        return builder.finish(keys)
    with typer.progressbar(length=len(making), label="compiling", file=sys.stderr) as bar:
        return builder.finish(keys, lambda built: bar.update(1))


def default_jobs() -> int:
    """One compiler process for each core this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_command(settings: CompileSettings) -> int:
    """Compiles exactly the templates of one rank; prints what was built and what was there."""
    started = time.perf_counter()
    model = open_model(settings)
    ranges = layer_ranges(model.layers, settings.world, settings.split)
    role = block_role(settings.rank, settings.world)
    target = named_target(settings.target_cpu)
    cache = Cache.open(settings.cache_dir)
    layers = ranges[settings.rank]
    with ObjectBuilder(target, cache, settings.jobs or default_jobs()) as builder:
        ahead = build_ahead(builder, lambda unit: runs_unit(unit, layers, role))
        plan, planned = plan_model(model, target, cache, show=False, ahead=ahead)
        partitions = plan.for_rank(layers, role)
        built = build_objects(plan, partitions, builder, cache, show=sys.stderr.isatty())
    block = f"layers [{layers.start}, {layers.stop})"
    print(f"rank {settings.rank} of {settings.world} ({role.name}), {block}, for {target.cpu}")
    print(f"  graph: {f'exported in {planned:.2f} s' if planned else 'from the cache'}")
    for each in built:
        print(f"  {object_line(each)}")
    print(f"  {compiled_line(built, time.perf_counter() - started)} in all")
    return 0
