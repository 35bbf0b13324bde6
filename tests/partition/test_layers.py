"""Every layer on exactly one rank, in contiguous blocks, the first block on the last rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import (
    BlockRole,
    block_role,
    layer_ranges,
    parse_split,
    pipeline_layer_range,
)

layer_counts = st.integers(0, 200)
worlds = st.integers(1, 40)
splits = st.lists(st.integers(0, 20), min_size=1, max_size=12)


def test_ten_layers_over_four_ranks() -> None:
    assert layer_ranges(10, 4) == [range(8, 10), range(6, 8), range(3, 6), range(0, 3)]


def test_more_ranks_than_layers_leaves_the_ranks_nearest_the_head_empty() -> None:
    assert [list(layers) for layers in layer_ranges(2, 4)] == [[], [], [1], [0]]


@given(layer_counts, worlds)
def test_even_split_owns_every_layer_once_contiguous_and_reversed(layers: int, world: int) -> None:
    ranges = layer_ranges(layers, world)
    assert [layer for block in reversed(ranges) for layer in block] == list(range(layers))
    assert all(block.step == 1 for block in ranges)


@given(layer_counts, worlds)
def test_even_split_sizes_differ_by_at_most_one_and_the_first_blocks_are_larger(
    layers: int, world: int
) -> None:
    forward = [len(block) for block in reversed(layer_ranges(layers, world))]
    assert forward == sorted(forward, reverse=True)
    assert forward[0] - forward[-1] <= 1
    assert forward.count(layers // world + 1) == layers % world


@given(layer_counts, worlds)
def test_a_rank_finds_its_own_range_alone(layers: int, world: int) -> None:
    alone = [pipeline_layer_range(layers, rank, world) for rank in range(world)]
    assert alone == layer_ranges(layers, world)


@given(splits)
def test_given_split_has_its_sizes_and_owns_every_layer_once(split: list[int]) -> None:
    ranges = layer_ranges(sum(split), len(split), split)
    assert [len(block) for block in ranges] == split
    assert [layer for block in reversed(ranges) for layer in block] == list(range(sum(split)))


@given(splits)
def test_a_written_split_is_read_back(split: list[int]) -> None:
    assert parse_split(",".join(map(str, split))) == tuple(split)


@pytest.mark.parametrize("text", ["", "8,,7", "8,x", "-1,9", "1.5,2", "8;7", "²,1"])
def test_unreadable_split_is_named(text: str) -> None:
    with pytest.raises(UserError, match="--split"):
        parse_split(text)


@pytest.mark.parametrize(
    ("split", "named"),
    [([5, 5, 5], "sums to 15 layers, but the model has 10"), ([5, 5], "names 2 ranks")],
)
def test_split_that_does_not_fit_is_refused_with_both_numbers(split: list[int], named: str) -> None:
    with pytest.raises(UserError, match=named):
        layer_ranges(10, 3, split)


def test_negative_size_in_a_split_that_sums_up_is_refused() -> None:
    with pytest.raises(UserError, match="negative"):
        layer_ranges(10, 3, [6, -1, 5])


@given(worlds)
def test_roles(world: int) -> None:
    roles = [block_role(rank, world) for rank in range(world)]
    if world == 1:
        assert roles == [BlockRole.SINGLE]
    else:
        assert roles == [BlockRole.LAST, *[BlockRole.MIDDLE] * (world - 2), BlockRole.FIRST]


@pytest.mark.parametrize(("rank", "world"), [(4, 4), (-1, 4), (1, 1), (0, 0)])
def test_rank_outside_the_pipeline_is_refused(rank: int, world: int) -> None:
    with pytest.raises(UserError, match=f"pipeline of {world} rank"):
        block_role(rank, world)
    with pytest.raises(UserError, match=f"pipeline of {world} rank"):
        pipeline_layer_range(10, rank, world)
