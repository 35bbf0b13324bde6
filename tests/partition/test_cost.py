"""The cost model: memory adds up, time is the roofline's, a full pipeline is as fast as its
slowest stage."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.partition.balance import best_split, greatest_cost
from buddy_pipeline.partition.cost import (
    PROCESS_BYTES,
    Host,
    Link,
    ModelCost,
    PartCost,
    Workload,
    memory_share,
    predict,
    stage_seconds,
    step_time,
)
from buddy_pipeline.partition.layers import BlockRole, layer_ranges

LAYER = PartCost(memory_bytes=1e6, streamed_bytes=1e6, flops=5e5, cache_bytes=1e3)
EMBEDDING = PartCost(memory_bytes=3e6, streamed_bytes=0, flops=0)
HEAD = PartCost(memory_bytes=3.5e6, streamed_bytes=3.5e6, flops=1.75e6)
MODEL = ModelCost([LAYER] * 12, EMBEDDING, HEAD, shared_bytes=3e6, row_bytes=4096)
HOST = Host("h", memory=1e9, bandwidth=1e9, flops=1e10)
FREE = Link(latency=0.0, bandwidth=math.inf)
WORK = Workload(sequences=8, context=100)


def test_the_ends_own_embedding_and_head_and_one_rank_shares_their_matrix() -> None:
    assert MODEL.block(range(0, 3), BlockRole.FIRST).memory_bytes == 3e6 + 3e6
    assert MODEL.block(range(3, 5), BlockRole.MIDDLE).memory_bytes == 2e6
    assert MODEL.block(range(0), BlockRole.LAST).memory_bytes == 3.5e6
    assert MODEL.block(range(12), BlockRole.SINGLE).memory_bytes == 12e6 + 3e6 + 0.5e6


def test_a_step_takes_the_longer_of_reading_and_computing() -> None:
    one = stage_seconds(LAYER, HOST, tokens=1, context=100)
    assert one == pytest.approx((1e6 + 50 * 1e3) / 1e9)
    many = stage_seconds(PartCost(1e6, 1e6, 5e5), HOST, tokens=1000, context=100)
    assert many == pytest.approx(1000 * 5e5 / 1e10)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    experts = PartCost(8e6, 0.0, 2e5, expert_bytes=8e6, chosen_bytes=2e6)

    def read(tokens: int) -> float:
        return stage_seconds(experts, replace(HOST, flops=math.inf), tokens, context=100) * 1e9

    assert read(1) == pytest.approx(2e6)
    assert read(2) == pytest.approx(2e6 + 2e6 * 3 / 4)
    assert read(100) == pytest.approx(8e6)
    both = ModelCost([LAYER + experts] * 12, EMBEDDING, HEAD, 0.0, 4096)
    whole = both.block(range(12), BlockRole.MIDDLE)
    cost = step_time(both, [HOST] * 2, Workload(sequences=4, context=100))
    parts = stage_seconds(both.block(range(5), BlockRole.FIRST), HOST, 2, 100)
    assert cost(1, range(5)) == pytest.approx(parts)
    assert whole.memory_bytes == pytest.approx(12 * 9e6)


@given(world=st.integers(1, 20), sequences=st.integers(1, 100))
def test_memory_of_all_ranks_is_the_model_s(world: int, sequences: int) -> None:
    work = Workload(sequences, 100)
    ranges = layer_ranges(12, world)
    plan = predict(MODEL, ranges, [HOST] * world, [FREE] * world, work)
    weights = 12e6 + 3e6 + 3.5e6 - (3e6 if world == 1 else 0)
    assert sum(s.weights for s in plan.stages) == pytest.approx(weights)
    assert sum(s.cache for s in plan.stages) == pytest.approx(12 * 1e3 * 100 * sequences)
    for stage in plan.stages:
        assert stage.memory == pytest.approx(stage.weights + stage.cache + PROCESS_BYTES)


def test_one_sequence_is_no_faster_on_more_ranks_and_many_are() -> None:
    layers = ModelCost([LAYER] * 12, NOTHING, NOTHING, 0.0, 4096)
    work = Workload(sequences=4000, context=100)
    plans = {
        world: predict(layers, layer_ranges(12, world), [HOST] * world, [FREE] * world, work)
        for world in (1, 4)
    }
    assert plans[4].one_sequence == pytest.approx(plans[1].one_sequence)
    assert plans[4].many_sequences > 3.5 * plans[1].many_sequences
    assert plans[4].microbatches == 4


def test_slow_links_cost_one_sequence_every_hop() -> None:
    slow = Link(latency=1e-3, bandwidth=1e6)
    ranges = layer_ranges(12, 3)
    free = predict(MODEL, ranges, [HOST] * 3, [FREE] * 3, WORK).one_sequence
    linked = predict(MODEL, ranges, [HOST] * 3, [slow] * 3, WORK).one_sequence
    assert 1 / linked - 1 / free == pytest.approx(3 * (1e-3 + 4096 / 1e6))
    alone = predict(MODEL, layer_ranges(12, 1), [HOST], [slow], WORK).one_sequence
    assert alone == predict(MODEL, layer_ranges(12, 1), [HOST], [FREE], WORK).one_sequence


def test_balancing_memory_gives_the_end_ranks_fewer_layers() -> None:
    hosts = [HOST] * 4
    cost = memory_share(MODEL, hosts, WORK)
    split = best_split(12, 4, cost)
    assert split is not None
    assert split[0] < split[1]
    assert split[3] < split[2]
    even = [len(block) for block in layer_ranges(12, 4)]
    assert greatest_cost(split, cost) < greatest_cost(even, cost)


def test_balancing_speed_gives_a_fast_host_more_and_a_small_one_what_it_holds() -> None:
    fast = Host("fast", 1e9, 4e9, 4e10)
    small = Host("small", PROCESS_BYTES + 2.5e6, 4e9, 4e10)
    hosts = [HOST, fast, small, HOST]
    work = Workload(1, 100)
    split = best_split(12, 4, step_time(MODEL, hosts, work))
    assert split is not None
    assert split[1] > max(split[0], split[3])
    assert split[2] == 2
    tiny = [Host("tiny", PROCESS_BYTES, 1e9, 1e9)] * 4
    assert best_split(12, 4, step_time(MODEL, tiny, work)) is None


NOTHING = PartCost(0.0, 0.0, 0.0)
