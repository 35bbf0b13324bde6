"""The engine cuts prompts into steps, asks for one row of logits, and refuses what cannot be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.ranks.engine import Engine, chunk_size
from buddy_pipeline.ranks.messages import ProtocolError
from buddy_pipeline.ranks.transport import Loopback
from tests.mpi.fake_stage import BOUNDS, MAX_ROWS, FakeStage

PROMPT = np.arange(21, dtype=np.int64) % BOUNDS.vocab


def engine(max_tokens: int = 8) -> tuple[Engine, FakeStage]:
    stage = FakeStage(0, 1)
    stage.max_tokens = max_tokens
    return Engine(stage, Loopback(max_tokens, MAX_ROWS), BOUNDS), stage


def test_a_prompt_runs_in_the_fewest_chunks_of_about_one_size() -> None:
    pipeline, stage = engine(max_tokens=8)
    pipeline.prefill(0, PROMPT)
    assert stage.steps == [7, 7, 7]


@pytest.mark.parametrize("max_tokens", [1, 4, 20, 21, 64])
def test_logits_do_not_depend_on_the_chunks(max_tokens: int) -> None:
    whole, _ = engine(max_tokens=64)
    cut, _ = engine(max_tokens)
    np.testing.assert_array_equal(cut.prefill(0, PROMPT), whole.prefill(0, PROMPT))


def test_decoding_continues_a_prefill() -> None:
    whole, _ = engine()
    stepwise, _ = engine()
    stepwise.prefill(1, PROMPT[:-1])
    last = stepwise.decode(1, int(PROMPT[-1]), len(PROMPT) - 1)
    np.testing.assert_array_equal(last, whole.prefill(0, PROMPT))


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_scoring_gives_the_logits_that_a_prefill_of_each_beginning_gives(max_tokens: int) -> None:
    pipeline, _ = engine(max_tokens)
    scored = np.concatenate([part.copy() for part in pipeline.score(0, PROMPT)])
    alone, _ = engine()
    beginnings = [alone.prefill(0, PROMPT[: n + 1]).copy() for n in range(len(PROMPT))]
    np.testing.assert_array_equal(scored, beginnings)


def test_scoring_may_continue_a_prefill() -> None:
    pipeline, _ = engine()
    whole = np.concatenate([part.copy() for part in pipeline.score(0, PROMPT)])
    pipeline.prefill(1, PROMPT[:5])
    rest = np.concatenate([part.copy() for part in pipeline.score(1, PROMPT[5:], 5)])
    np.testing.assert_array_equal(rest, whole[5:])


def test_it_tells_the_size_of_things() -> None:
    pipeline, _ = engine(max_tokens=4)
    sizes = (pipeline.vocab_size, pipeline.context_length, pipeline.chunk)
    assert sizes == (BOUNDS.vocab, BOUNDS.context, 4)
    assert pipeline.prefill(0, PROMPT).shape == (BOUNDS.vocab,)
    assert len(pipeline.peak_memory()) == 1


@pytest.mark.parametrize(
    ("slot", "ids", "start", "message"),
    [
        (0, [], 0, "at least one id"),
        (0, [[1]], 0, "one dimension"),
        (2, [1], 0, "slot 2: there are 2"),
        (-1, [1], 0, "slot -1"),
        (0, [1, 2], 63, "2 tokens from position 63: the context has 64 positions"),
        (0, [1], -1, "from position -1"),
        (0, [1, 23], 0, "ids from 1 to 23: the vocabulary has 23"),
        (0, [-1], 0, "ids from -1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    slot: int, ids: list[int], start: int, message: str
) -> None:
    pipeline, stage = engine()
    with pytest.raises(ValueError, match=message):
        pipeline.prefill(slot, np.array(ids, dtype=np.int64), start)
    assert stage.steps == []


def test_closing_twice_is_closing_once() -> None:
    pipeline, _ = engine()
    pipeline.close()
    pipeline.close()


def test_nothing_arrives_that_was_not_sent() -> None:
    with pytest.raises(ProtocolError, match="before anything was sent"):
        Loopback(8, 1).receive()


@given(
    tokens=st.integers(1, 10_000),
    world=st.integers(1, 32),
    longest=st.integers(1, 2048),
)
def test_chunks_are_even_and_within_the_longest(tokens: int, world: int, longest: int) -> None:
    size = chunk_size(tokens, world, longest)
    assert 1 <= size <= longest
    chunks = -(-tokens // size)
    assert chunks * size - tokens < chunks, "no chunk is shorter than needed by more than one"


@pytest.mark.parametrize(("tokens", "world", "size"), [(512, 1, 512), (512, 2, 74), (512, 4, 47)])
def test_more_ranks_get_more_chunks_to_fill_the_pipeline(
    tokens: int, world: int, size: int
) -> None:
    assert chunk_size(tokens, world, 1024) == size
