"""The engine runs many sequences at once, each with the logits that it would have alone."""

import numpy as np
import pytest

from buddy_pipeline.ranks.engine import Engine
from buddy_pipeline.ranks.messages import ProtocolError
from buddy_pipeline.ranks.sequence import Sequence
from buddy_pipeline.ranks.transport import Loopback
from tests.mpi.fake_stage import (
    BOUNDS,
    IN_FLIGHT,
    MAX_CHANGES,
    MAX_ROWS,
    FakeStage,
    fake_engine,
    greedy,
    run,
)

PROMPT = [3 * i % BOUNDS.vocab for i in range(45)]
PROMPTS = {
    "long": PROMPT,
    "same start": [*PROMPT[:40], 1, 2],
    "same again": PROMPT[:44],
    **{f"short {i}": [i, i + 1] for i in range(6)},
}


def engine(max_tokens: int = 8, in_flight: int = IN_FLIGHT, **how: int) -> tuple[Engine, FakeStage]:
    stage = FakeStage(0, 1)
    ring = Loopback(max_tokens, MAX_ROWS, max_changes=MAX_CHANGES, in_flight=in_flight)
    return fake_engine(stage, ring, max_tokens=max_tokens, in_flight=in_flight, **how), stage


def alone(ids: list[int], tokens: int) -> np.ndarray:
    return run(engine(max_tokens=64)[0], {"": ids}, tokens)[""]


@pytest.mark.parametrize("in_flight", [1, 2, 5])
@pytest.mark.parametrize("max_tokens", [4, 7, 64])
def test_logits_do_not_depend_on_what_runs_beside_a_sequence(
    max_tokens: int, in_flight: int
) -> None:
    together = run(engine(max_tokens, in_flight)[0], PROMPTS, 6)
    for name, ids in PROMPTS.items():
        np.testing.assert_array_equal(together[name], alone(ids, 6), err_msg=name)


def test_a_cache_that_holds_only_one_sequence_still_serves_all() -> None:
    """Sequences that outgrow the memory wait and start again, with the same outcome."""
    pipeline, _ = engine(positions=BOUNDS.context)
    together = run(pipeline, PROMPTS, 30)
    for name, ids in PROMPTS.items():
        np.testing.assert_array_equal(together[name], alone(ids, 30), err_msg=name)


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    pipeline, stage = engine(max_tokens=64)
    run(pipeline, {"": PROMPT}, 1)
    before = sum(stage.steps)
    again = Sequence([*PROMPT[:42], 5], greedy)
    pipeline.submit(again)
    pipeline.advance()
    assert again.reused == 42
    assert sum(stage.steps) - before == 1


def test_sequences_with_one_prefix_compute_it_once_though_they_come_together() -> None:
    pipeline, stage = engine(max_tokens=64)
    run(pipeline, {str(i): [*PROMPT[:40], i] for i in range(MAX_ROWS)}, 1)
    assert sum(stage.steps) == 40 + MAX_ROWS


def test_more_sequences_than_run_at_once_wait_their_turn() -> None:
    pipeline, _ = engine(sequences=2)
    sequences = [Sequence([i], greedy) for i in range(5)]
    for sequence in sequences:
        pipeline.submit(sequence)
    order: list[int] = []
    while sampled := pipeline.advance():
        for each in sampled:
            order.append(sequences.index(each.sequence))
            pipeline.finish(each.sequence)
    assert order == [0, 1, 2, 3, 4]


def test_a_full_context_ends_a_sequence_after_the_token_that_needs_no_place() -> None:
    pipeline, _ = engine()
    sequence = Sequence([1] * (BOUNDS.context - 2), greedy)
    pipeline.submit(sequence)
    tokens = 0
    while pipeline.advance():
        tokens += 1
    assert tokens == 3
    assert sequence.finished


def test_a_sequence_can_be_ended_before_it_begins_and_amid_its_prompt() -> None:
    pipeline, _ = engine(max_tokens=4, sequences=1)
    first, second, third = (Sequence([*PROMPT], greedy) for _ in range(3))
    for sequence in (first, second, third):
        pipeline.submit(sequence)
    pipeline.finish(second)
    pipeline.finish(second)
    (sampled,) = pipeline.advance()
    assert sampled.sequence is first
    pipeline.finish(first)
    assert [each.sequence for each in pipeline.advance()] == [third]
    pipeline.finish(third)
    assert pipeline.advance() == []


def test_asking_for_peak_memory_amid_the_work_loses_no_token() -> None:
    pipeline, _ = engine(max_tokens=4)
    sequence = Sequence([1, 2, 3], greedy)
    pipeline.submit(sequence)
    for expected in range(4, 9):
        assert len(pipeline.peak_memory()) == 1
        assert [each.sequence for each in pipeline.advance()] == [sequence]
        assert len(sequence.ids) == expected


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "a prompt of 0 tokens: expected 1 to 96"),
        ([1] * 97, "a prompt of 97 tokens"),
        ([1, 23], "ids from 1 to 23: the vocabulary has 23"),
        ([-1], "ids from -1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(ids: list[int], message: str) -> None:
    pipeline, stage = engine()
    with pytest.raises(ValueError, match=message):
        pipeline.submit(Sequence(ids, greedy))
    assert pipeline.advance() == []
    assert stage.steps == []


def test_closing_twice_is_closing_once_whatever_is_under_way() -> None:
    pipeline, _ = engine(max_tokens=4)
    pipeline.submit(Sequence([*PROMPT], greedy))
    pipeline.submit(Sequence([1], greedy))
    pipeline.advance()
    pipeline.close()
    pipeline.close()


def test_nothing_arrives_that_was_not_sent() -> None:
    with pytest.raises(ProtocolError, match="before anything was sent"):
        Loopback(8, 1, max_changes=0).receive()
