"""How long each layer of a stage takes on this rank."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns

from buddy_pipeline.compile.manifest import KV_BLOCK
from buddy_pipeline.ranks.messages import Kind, StepBuffer
from buddy_pipeline.ranks.stage import Stage

_WARM_UPS = 2
_RUNS = 5


@dataclass(frozen=True)
class BlockTimes:
    """Times of one step of a rank's block, ns."""

    layers: dict[int, float]
    """By layer."""
    rest: float
    """Embedding, head, and the call itself."""


def block_times(stage: Stage, tokens: int) -> BlockTimes:
    """Times the stage on `tokens` tokens, with logits for each, at the start of slot 0.

    The slot is empty before and after. The stage must have room for so many tokens and rows.

    The quickest of a few runs counts, since whatever disturbs a run only makes it longer; its time
    is dealt out to the layers as the profile of all runs is.
    """
    if stage.is_empty:
        return BlockTimes({}, 0.0)
    rows = tokens if stage.vocab_size else 0
    arriving = StepBuffer(tokens, rows, stage.input_bytes)
    leaving = StepBuffer(tokens, rows, stage.output_bytes)
    step = arriving.begin(Kind.STEP, 0, tokens=tokens, rows=rows)
    following = leaving.begin(Kind.STEP, 0, tokens=tokens, rows=rows)
    for array in (step.slots, step.ids, step.payload):
        array[:] = 0
    step.positions[:] = range(tokens)
    step.rows[:] = range(rows)
    stage.kv.apply([(0, -(-tokens // KV_BLOCK) * KV_BLOCK, 0, 0)])

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
        stage.kv.apply([(0, 0, 0, 0)])
    times = profile.read()
    layers: dict[int, float] = {}
    for each in times.regions:
        if each.region.unit.isdecimal():
            layer = int(each.region.unit)
            share = (each.wall + each.gap_before) / times.span
            layers[layer] = layers.get(layer, 0.0) + share * quickest
    return BlockTimes(layers, max(0.0, quickest - sum(layers.values())))
