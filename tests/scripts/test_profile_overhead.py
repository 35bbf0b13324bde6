"""The cost of the profile is told from pairs of steps, whatever else changes from pair to pair."""

import random

from profile_overhead import Cost


def test_a_small_cost_is_found_among_steps_that_differ_by_more() -> None:
    chance = random.Random(1)
    off = [1_000_000 + chance.randrange(200_000) for _ in range(2000)]
    on = [time + 5_000 + chance.randrange(-2_000, 2_001) for time in off]
    cost = Cost.of(off, on)
    assert abs(cost.share * cost.step_ns - 5_000) < 500
    assert cost.low < cost.share < cost.high < 1.2 * cost.share


def test_what_costs_nothing_is_not_told_from_nothing() -> None:
    chance = random.Random(2)
    off, on = ([1_000_000 + chance.randrange(50_000) for _ in range(500)] for _ in range(2))
    cost = Cost.of(off, on)
    assert cost.low < 0 < cost.high


def test_a_few_pairs_have_the_widest_interval() -> None:
    cost = Cost.of([100, 100, 100], [90, 101, 130])
    assert (cost.low, cost.share, cost.high) == (-0.1, 0.01, 0.3)
