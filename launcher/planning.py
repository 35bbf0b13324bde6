"""The `plan` command: what a split needs and does on given hosts, from the cost model alone."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from buddy_pipeline.launcher.hosts import Cluster, like_hosts, read_hosts
from buddy_pipeline.launcher.model import Model, open_model
from buddy_pipeline.launcher.model_cost import model_cost
from buddy_pipeline.launcher.settings import PlanBalance, PlanSettings
from buddy_pipeline.partition.balance import best_split
from buddy_pipeline.partition.cost import (
    Host,
    ModelCost,
    Prediction,
    Workload,
    memory_share,
    predict,
    step_time,
)
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import layer_ranges
from buddy_pipeline.ranks.affinity import available_cores

#: One Zen 5 core's f32 multiply-adds, and the memory bandwidth of the machine it is in, both as
#: measured; see docs/architecture.md. Supposed where no hosts file says otherwise.
_CORE_FLOPS = 265e9
_BANDWIDTH = 41e9


def plan_command(settings: PlanSettings) -> int:
    """Prints the plan; exit code 1 if some rank's host has not the memory."""
    model = open_model(settings)
    costs = model_cost(model)
    if settings.hosts is None:
        cluster = like_hosts(_this_host(), settings.world)
    else:
        cluster = read_hosts(settings.hosts, settings.world)
    work = Workload(settings.sequences, model.context)
    ranges = _ranges(settings, costs, cluster, work)
    prediction = predict(costs, ranges, cluster.hosts, cluster.links, work)
    for line in _lines(settings, model, prediction, cluster, work):
        print(line)
    return 0 if all(stage.fits for stage in prediction.stages) else 1


def _this_host() -> Host:
    """This machine's memory and cores, each core and the memory as fast as the ones measured."""
    cores = len(available_cores())
    return Host("like this", psutil.virtual_memory().total, _BANDWIDTH, cores * _CORE_FLOPS)


def _ranges(
    settings: PlanSettings, costs: ModelCost, cluster: Cluster, work: Workload
) -> list[range]:
    world, split = settings.world, settings.split
    if settings.balance is PlanBalance.MEMORY:
        split = best_split(costs.layers, world, memory_share(costs, cluster.hosts, work))
    elif settings.balance is PlanBalance.SPEED:
        split = best_split(costs.layers, world, step_time(costs, cluster.hosts, work))
        if split is None:
            raise UserError(
                f"--balance speed: no split over {counted(world, 'rank')} fits their memory with "
                f"--sequences {work.sequences}: use more ranks, fewer sequences or a shorter "
                "max_token_len in the spec"
            )
    return layer_ranges(costs.layers, world, split)


def _lines(
    settings: PlanSettings,
    model: Model,
    prediction: Prediction,
    cluster: Cluster,
    work: Workload,
) -> Iterator[str]:
    stages = prediction.stages
    yield (
        f"{settings.spec}, {model.variant}: {counted(model.layers, 'layer')} over "
        f"{counted(settings.world, 'rank')}, {counted(work.sequences, 'sequence')} of up to "
        f"{counted(work.context, 'position')}"
    )
    if settings.hosts is None:
        host = cluster.hosts[0]
        yield (
            f"supposing hosts with {host.memory / 1e9:,.0f} GB, {host.bandwidth / 1e9:,.0f} GB/s "
            f"and {host.flops / 1e9:,.0f} GFLOP/s each, on 10 Gbit/s Ethernet: --hosts tells better"
        )
    yield f"split {','.join(str(len(stage.layers)) for stage in stages)}"
    yield (
        f"{'rank':>5}  {'host':16}{'layers':>12}{'weights MB':>12}{'KV cache MB':>13}"
        f"{'process MB':>12}{'of memory':>11}{'ms a token':>12}"
    )
    for rank, stage in enumerate(stages):
        layers = f"{stage.layers.start}-{stage.layers.stop - 1}" if stage.layers else "none"
        share = 100 * stage.memory / stage.host.memory
        yield (
            f"{rank:5}  {stage.host.name[:15]:16}{layers:>12}{stage.weights / 1e6:12,.1f}"
            f"{stage.cache / 1e6:13,.1f}{stage.memory / 1e6:12,.1f}{share:9.1f} %"
            f"{1e3 * stage.seconds:12,.3f}" + ("" if stage.fits else "  does not fit")
        )
    yield f"one sequence: {prediction.one_sequence:,.1f} tokens/s"
    yield (
        f"{counted(work.sequences, 'sequence')}: {prediction.many_sequences:,.1f} tokens/s, "
        f"in {counted(prediction.microbatches, 'microbatch', 'microbatches')}"
    )
