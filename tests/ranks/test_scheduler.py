"""The policy, on simulated stages: in order, without starvation, with the stages kept busy."""

import random
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.ranks.scheduler import (
    Limits,
    Microbatch,
    Scheduler,
    chunk_size,
    groups_for,
)
from buddy_pipeline.ranks.sequence import Sequence
from buddy_pipeline.ranks.slots import Slots
from tests.ranks.simulation import Outcome, simulate

TIERS = (32, 64, 128, 256)


def scheduler(
    stages: int = 2,
    sequences: int = 8,
    tokens: int = 64,
    positions: int = 1 << 20,
    prefill_chunk: int | None = None,
) -> Scheduler:
    in_flight = stages + 1 if stages > 1 else 1
    limits = Limits(stages, tokens, sequences, in_flight, stages, prefill_chunk)
    return Scheduler(limits, Slots(2 * sequences, TIERS, positions))


def sequence(length: int, first: int = 0) -> Sequence:
    """A prompt that shares no prefix with those of another `first`."""
    return Sequence([first, *range(1, length)], lambda logits, history: 0)


def cost(stage: int, microbatch: Microbatch) -> float:
    """Reading the weights takes as long as the arithmetic of 13 tokens."""
    return float(max(13, sum(p.stop - p.start for p in microbatch.pieces)))


def decodes(microbatch: Microbatch) -> int:
    return sum(p.start >= p.sequence.prompt_length for p in microbatch.pieces)


def prompt_tokens(microbatch: Microbatch) -> int:
    return sum(p.stop - p.start for p in microbatch.pieces) - decodes(microbatch)


work = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 50)), min_size=1, max_size=30)


@given(
    work=work,
    stages=st.integers(1, 6),
    sequences=st.integers(1, 9),
    positions=st.sampled_from([256, 300, 500, 1 << 20]),
    gap=st.sampled_from([0.0, 5.0, 200.0]),
)
def test_every_sequence_gets_all_its_tokens_and_prompts_begin_in_order(
    work: list[tuple[int, int]], stages: int, sequences: int, positions: int, gap: float
) -> None:
    """Also when the KV cache holds hardly more than one sequence."""
    policy = scheduler(stages, sequences, 64, positions)
    all_sequences = [sequence(length, i) for i, (length, _) in enumerate(work)]
    arrivals = [(i * gap, s, work[i][1]) for i, s in enumerate(all_sequences)]

    def within_limits(microbatch: Microbatch) -> None:
        assert sum(p.stop - p.start for p in microbatch.pieces) <= 64
        assert len(microbatch.changes) <= 2 * 2 * sequences
        assert policy.running <= sequences
        of_prompts = {p.sequence for p in microbatch.pieces}
        assert len(of_prompts) == len(microbatch.pieces), "a sequence is in a microbatch once"

    outcome = simulate(policy, arrivals, cost, within_limits)
    assert outcome.admitted == all_sequences
    assert {s: len(s.ids) - s.prompt_length for s in all_sequences} == {
        s: tokens for _, s, tokens in arrivals
    }
    assert policy.waiting == policy.running == 0


def test_a_sequence_that_decodes_is_in_one_microbatch_at_a_time() -> None:
    policy = scheduler(stages=4)

    def check(microbatch: Microbatch) -> None:
        for piece in microbatch.pieces:
            if piece.start >= piece.sequence.prompt_length:
                assert piece.sequence.under_way == 1

    simulate(policy, [(0.0, sequence(50, i), 20) for i in range(6)], cost, check)


@pytest.mark.parametrize("count", [4, 16, 64])
def test_decoding_sequences_share_the_groups_evenly(count: int) -> None:
    policy = scheduler(stages=4, sequences=count, tokens=512)
    sizes: list[int] = []
    simulate(
        policy,
        [(0.0, sequence(5, i), 60) for i in range(count)],
        cost,
        lambda microbatch: sizes.append(len(microbatch.pieces)),
    )
    steady = sizes[len(sizes) // 2 : len(sizes) * 3 // 4]
    assert set(steady) == {count // 4}


def test_stages_are_busy_when_there_are_sequences_for_all() -> None:
    policy = scheduler(stages=8, sequences=64, tokens=512)
    outcome = simulate(policy, [(0.0, sequence(5, i), 100) for i in range(64)], cost)
    assert outcome.bubble < 0.05


def test_a_long_prompt_alone_fills_the_stages_with_its_chunks() -> None:
    policy = scheduler(stages=4, tokens=512)
    chunks: list[int] = []
    outcome = simulate(
        policy,
        [(0.0, sequence(255), 1)],
        cost,
        lambda microbatch: chunks.append(prompt_tokens(microbatch)),
    )
    assert max(chunks) - min(chunks) <= max(chunks) // 2
    whole = 4 * 255.0
    assert outcome.end < whole / 2


def test_a_long_prompt_leaves_running_sequences_their_pace() -> None:
    def slowest_token(outcome: Outcome, of: Sequence) -> float:
        times = outcome.token_times[of]
        return max(b - a for a, b in pairwise(times))

    def run(chunk: int | None) -> float:
        policy = scheduler(stages=1, tokens=512, prefill_chunk=chunk)
        runner = sequence(4, 1)
        arrivals = [(0.0, runner, 60), (100.0, sequence(250, 2), 1)]
        return slowest_token(simulate(policy, arrivals, cost), runner)

    assert run(512) > 240
    assert run(None) <= 65 + 13
    assert run(16) <= 17 + 13


def test_the_prefill_chunk_limits_prompt_tokens_only() -> None:
    policy = scheduler(stages=1, sequences=32, tokens=512, prefill_chunk=10)
    seen: list[Microbatch] = []
    simulate(policy, [(0.0, sequence(25, i), 40) for i in range(32)], cost, seen.append)
    assert max(map(prompt_tokens, seen)) == 10
    assert max(map(decodes, seen)) > 10


def test_who_outgrows_the_memory_takes_that_of_the_youngest() -> None:
    policy = scheduler(stages=1, positions=256)
    old, young = sequence(60, 1), sequence(60, 2)
    outcome = simulate(policy, [(0.0, old, 150), (0.0, young, 150)], cost)
    assert outcome.finished[old] < outcome.finished[young]
    assert young.sent + 1 == len(young.ids) == 210


def test_a_decision_costs_the_same_however_many_wait() -> None:
    """Counted in lines of the program that are executed."""

    def lines(waiting: int) -> int:
        policy = scheduler()
        for i in range(waiting):
            policy.add(sequence(30, i))
        count = 0

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal count
            count += event == "line"
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in range(3):
                policy.next()
        finally:
            sys.settrace(previous)
        return count

    assert lines(500) == lines(10_000)


@pytest.mark.parametrize(
    ("count", "stages"), [(600, 16), pytest.param(10_000, 64, marks=pytest.mark.slow)]
)
def test_many_sequences_of_mixed_lengths_keep_many_stages_busy(count: int, stages: int) -> None:
    chance = random.Random(1)
    policy = scheduler(stages=stages, sequences=4 * stages, tokens=512)
    arrivals = [
        (float(i), sequence(chance.randint(1, 100), i), chance.randint(1, 12)) for i in range(count)
    ]
    outcome = simulate(policy, arrivals, cost)
    assert outcome.admitted == [s for _, s, _ in arrivals]
    assert len(outcome.finished) == count
    assert outcome.bubble < 0.2


@given(
    tokens=st.integers(1, 10_000),
    stages=st.integers(1, 32),
    longest=st.integers(1, 2048),
)
def test_chunks_are_even_and_within_the_longest(tokens: int, stages: int, longest: int) -> None:
    size = chunk_size(tokens, stages, longest)
    assert 1 <= size <= longest
    chunks = -(-tokens // size)
    assert chunks * size - tokens < chunks, "no chunk is shorter than needed by more than one"


@pytest.mark.parametrize(("tokens", "stages", "size"), [(512, 1, 512), (512, 2, 74), (512, 4, 47)])
def test_more_ranks_get_more_chunks_to_fill_the_pipeline(
    tokens: int, stages: int, size: int
) -> None:
    assert chunk_size(tokens, stages, 1024) == size


@pytest.mark.parametrize(
    ("total", "slowest", "groups"),
    [(4.0, 1.0, 4), (4.05, 1.0, 4), (4.2, 1.0, 5), (4.0, 2.0, 2), (9.0, 1.0, 5), (1.0, 1.0, 1)],
)
def test_there_are_as_many_groups_as_keep_the_slowest_stage_busy(
    total: float, slowest: float, groups: int
) -> None:
    assert groups_for(total, slowest, 5) == groups
