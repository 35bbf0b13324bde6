"""How long each layer of a stage takes on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns

from buddy_pipeline.ranks.messages import Kind, StepBuffer
from buddy_pipeline.ranks.stage import Stage

_WARM_UPS = 2
_RUNS = 5


@dataclass(frozen=True)
class BlockTimes:
    """Times of one decode step of a rank's block, ns."""

    layers: dict[int, float]
    """By layer."""
    rest: float
    """Embedding, head, and the call itself."""


def block_times(stage: Stage) -> BlockTimes:
    """Times the stage on one token at the start of slot 0, whose KV cache is then overwritten.

    The quickest of a few runs counts, since whatever disturbs a run only makes it longer; its time
    is dealt out to the layers as the profile of all runs is.
    """
    if stage.is_empty:
        return BlockTimes({}, 0.0)
    arriving = StepBuffer(1, 1, stage.input_bytes)
    leaving = StepBuffer(1, 1, stage.output_bytes)
    rows = 1 if stage.vocab_size else 0
    step = arriving.begin(Kind.STEP, 0, tokens=1, rows=rows)
    following = leaving.begin(Kind.STEP, 0, tokens=1, rows=rows)
    for array in (step.positions, step.slots, step.ids, step.rows, step.payload):
        array[:] = 0

    def run() -> int:
        begin = perf_counter_ns()
        stage.run(step, step.payload_address, following.payload_address)
        return perf_counter_ns() - begin

    for _ in range(_WARM_UPS):
        run()
    profile = stage.profile(slots=len(stage.regions))
    try:
        quickest = min(run() for _ in range(_RUNS))
    finally:
        stage.stop_profile()
    times = profile.read()
    layers: dict[int, float] = {}
    for each in times.regions:
        if each.region.unit.isdecimal():
            layer = int(each.region.unit)
            share = (each.wall + each.gap_before) / times.span
            layers[layer] = layers.get(layer, 0.0) + share * quickest
    return BlockTimes(layers, max(0.0, quickest - sum(layers.values())))
