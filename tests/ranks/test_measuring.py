"""A stage's layers are timed one by one, on as many tokens as asked."""

from buddy_pipeline.ranks.measuring import block_times
from tests.ranks.made_stage import MadeStage

LAYERS, TICKS = 3, (200_000, 100_000)


def test_like_layers_take_about_the_same_and_nothing_is_left_behind() -> None:
    made = MadeStage(LAYERS, TICKS, threads=1)
    made.stage.kv.apply([(0, 0, 0, 0)])
    times = block_times(made.stage, 1)
    assert sorted(times.layers) == list(range(LAYERS))
    # Of ten runs the quickest counts: nothing disturbs one region in all of them.
    assert max(times.layers.values()) < 1.5 * min(times.layers.values())
    assert times.rest == 0
    assert made.stage.kv.capacities.tolist() == [0]
