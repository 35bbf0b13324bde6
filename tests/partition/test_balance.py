"""No contiguous split has a smaller greatest stage than the one that is chosen."""

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.partition.balance import StageCost, best_split, greatest_cost
from buddy_pipeline.partition.layers import layer_ranges

COSTS = st.one_of(st.integers(0, 9).map(float), st.floats(0, 1e6), st.just(1e-300))


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, StageCost]:
    """Layers of any cost on ranks of any speed, which have something to do besides."""
    layers, world = draw(st.integers(0, 7)), draw(st.integers(1, 4))
    costs = draw(st.lists(COSTS, min_size=layers, max_size=layers))
    extras = draw(st.lists(COSTS, min_size=world, max_size=world))
    speeds = draw(st.lists(st.floats(0.1, 10), min_size=world, max_size=world))
    rooms = draw(st.lists(st.sampled_from([2.0, 1e5, math.inf]), min_size=world, max_size=world))

    def cost(rank: int, block: range) -> float:
        # fsum: a sum that rounds on the way may be less for more layers.
        whole = math.fsum([extras[rank], *(costs[layer] for layer in block)]) * speeds[rank]
        return whole if whole <= rooms[rank] else math.inf

    return layers, world, cost


def all_splits(layers: int, world: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations_with_replacement(range(layers + 1), world - 1):
        edges = [0, *cuts, layers]
        yield tuple(edges[i + 1] - edges[i] for i in range(world))


@given(problems())
def test_no_split_has_a_smaller_greatest_stage(problem: tuple[int, int, StageCost]) -> None:
    layers, world, cost = problem
    least = min(greatest_cost(split, cost) for split in all_splits(layers, world))
    chosen = best_split(layers, world, cost)
    if chosen is None:
        assert least == math.inf
    else:
        assert least < math.inf
        assert len(chosen) == world
        assert sum(chosen) == layers
        assert min(chosen) >= 0
        assert greatest_cost(chosen, cost) == least


@pytest.mark.parametrize(("layers", "world"), [(30, 4), (9, 4), (3, 5), (28, 1), (0, 2)])
def test_like_layers_and_ranks_get_the_even_split(layers: int, world: int) -> None:
    even = tuple(len(block) for block in layer_ranges(layers, world))
    assert best_split(layers, world, lambda rank, block: float(len(block))) == even


def test_a_costly_head_and_embedding_leave_the_end_ranks_fewer_layers() -> None:
    extras = {0: 3.0, 3: 2.0}
    chosen = best_split(20, 4, lambda rank, block: extras.get(rank, 0.0) + len(block))
    assert chosen == (3, 6, 6, 5)


def test_a_slow_rank_gets_fewer_layers() -> None:
    pace = [1.0, 4.0, 1.0]
    chosen = best_split(18, 3, lambda rank, block: pace[rank] * len(block))
    assert chosen == (8, 2, 8)


def test_a_thousand_ranks_take_no_search_over_splits() -> None:
    asked = 0

    def cost(rank: int, block: range) -> float:
        nonlocal asked
        asked += 1
        return len(block) + (rank % 7) / 8

    chosen = best_split(200, 1024, cost)
    assert chosen is not None
    assert greatest_cost(chosen, cost) < 2
    assert asked < 1_000_000
