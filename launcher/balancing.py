"""Dealing layers out to ranks: by number, by memory, or by measured time."""

from __future__ import annotations

from collections.abc import Sequence

from buddy_pipeline.launcher.model import Model
from buddy_pipeline.launcher.model_cost import model_cost
from buddy_pipeline.launcher.settings import Balance
from buddy_pipeline.partition.balance import StageCost, best_split
from buddy_pipeline.partition.cost import Workload, stage_memory
from buddy_pipeline.partition.layers import layer_ranges
from buddy_pipeline.ranks.measuring import BlockTimes


def first_ranges(
    model: Model,
    world: int,
    split: tuple[int, ...] | None,
    balance: Balance,
    sequences: int,
) -> list[range]:
    """The layers of every rank, by rank, as far as they are known before anything has run.

    sequences: that the KV cache has room for.
    """
    if balance is Balance.MEMORY:
        work = Workload(sequences, model.context)
        cost = model_cost(model).stage_cost(world, lambda part: stage_memory(part, work))
        split = best_split(model.layers, world, cost)
    return layer_ranges(model.layers, world, split)


def measured_ranges(layers: int, times: Sequence[BlockTimes]) -> list[range]:
    """The layers of every rank with the fastest slowest stage, from each rank's block timed on it.

    times: by rank.
    """
    return layer_ranges(layers, len(times), best_split(layers, len(times), _cost(layers, times)))


def _cost(layers: int, times: Sequence[BlockTimes]) -> StageCost:
    """Predicted times of any block on any rank, ns.

    A layer takes on another rank as much more or less time than on its own as that rank's layers
    take on average; a rank without layers is supposed to be like the average of those that have
    some.
    """
    timed = [t.layers for t in times if t.layers]
    overall = sum(sum(own.values()) / len(own) for own in timed) / len(timed)
    paces = [sum(t.layers.values()) / len(t.layers) if t.layers else overall for t in times]
    relative = [0.0] * layers
    for pace, own in zip(paces, times, strict=True):
        for layer, time in own.layers.items():
            relative[layer] = time / pace
    before = [0.0]
    for weight in relative:
        before.append(before[-1] + weight)

    def cost(rank: int, block: range) -> float:
        return times[rank].rest + paces[rank] * (before[block.stop] - before[block.start])

    return cost
