"""How long each layer of a stage takes on this rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from buddy_pipeline.compile.manifest import KV_BLOCK
from buddy_pipeline.ranks.messages import Kind, StepBuffer
from buddy_pipeline.ranks.stage import Stage

_WARM_UPS = 2
_RUNS = 10


@dataclass(frozen=True)
class BlockTimes:
    """Times of one step of a rank's block, ns."""

    layers: dict[int, float]
    """By layer."""
    rest: float
    """Embedding and head."""


def block_times(stage: Stage, tokens: int) -> BlockTimes:
    """Times the stage on `tokens` tokens, with logits for each, at the start of slot 0.

    The slot is empty before and after. The stage must have room for so many tokens and rows.

    Of each region of the compiled code the quickest of a few runs counts, since whatever disturbs a
    run only makes it longer, and seldom everywhere.
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

    def run() -> None:
        stage.run(step, step.payload_address, following.payload_address)

    for _ in range(_WARM_UPS):
        run()
    profile = stage.profile(slots=len(stage.regions))
    sums = np.zeros((_RUNS + 1, len(stage.regions)))
    try:
        for number in range(_RUNS):
            run()
            times = profile.read().regions
            sums[number + 1] = [each.wall + each.gap_before for each in times]
    finally:
        stage.stop_profile()
        stage.kv.apply([(0, 0, 0, 0)])
    layers: dict[int, float] = {}
    rest = 0.0
    for region, time in zip(stage.regions, np.diff(sums, axis=0).min(axis=0), strict=True):
        if region.unit.isdecimal():
            layers[int(region.unit)] = layers.get(int(region.unit), 0.0) + float(time)
        else:
            rest += float(time)
    return BlockTimes(layers, rest)
