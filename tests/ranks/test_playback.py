"""Given tokens run in steps, with one row of logits or all, and what cannot be is refused."""

import numpy as np
import pytest

from buddy_pipeline.ranks.playback import Playback
from tests.mpi.fake_stage import BOUNDS, MAX_ROWS, FakeStage

PROMPT = np.arange(21, dtype=np.int64) % BOUNDS.vocab


def playback(max_tokens: int = 8) -> tuple[Playback, FakeStage]:
    stage = FakeStage(0, 1)
    return Playback(stage, BOUNDS, tokens=max_tokens, rows=MAX_ROWS), stage


def test_a_prompt_runs_in_the_fewest_chunks_of_about_one_size() -> None:
    pipeline, stage = playback(max_tokens=8)
    pipeline.prefill(0, PROMPT)
    assert stage.steps == [7, 7, 7]


@pytest.mark.parametrize("max_tokens", [1, 4, 20, 21, 64])
def test_logits_do_not_depend_on_the_chunks(max_tokens: int) -> None:
    whole, _ = playback(max_tokens=64)
    cut, _ = playback(max_tokens)
    np.testing.assert_array_equal(cut.prefill(0, PROMPT), whole.prefill(0, PROMPT))


def test_decoding_continues_a_prefill() -> None:
    whole, _ = playback()
    stepwise, _ = playback()
    stepwise.prefill(1, PROMPT[:-1])
    last = stepwise.decode(1, int(PROMPT[-1]), len(PROMPT) - 1)
    np.testing.assert_array_equal(last, whole.prefill(0, PROMPT))


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_scoring_gives_the_logits_that_a_prefill_of_each_beginning_gives(max_tokens: int) -> None:
    pipeline, _ = playback(max_tokens)
    scored = np.concatenate([part.copy() for part in pipeline.score(0, PROMPT)])
    alone, _ = playback()
    beginnings = [alone.prefill(0, PROMPT[: n + 1]).copy() for n in range(len(PROMPT))]
    np.testing.assert_array_equal(scored, beginnings)


def test_scoring_may_continue_a_prefill() -> None:
    pipeline, _ = playback()
    whole = np.concatenate([part.copy() for part in pipeline.score(0, PROMPT)])
    pipeline.prefill(1, PROMPT[:5])
    rest = np.concatenate([part.copy() for part in pipeline.score(1, PROMPT[5:], 5)])
    np.testing.assert_array_equal(rest, whole[5:])


@pytest.mark.parametrize(
    ("slot", "ids", "start", "message"),
    [
        (0, [], 0, "at least one id"),
        (0, [[1]], 0, "one dimension"),
        (8, [1], 0, "slot 8: there are 8"),
        (-1, [1], 0, "slot -1"),
        (0, [1, 2], 95, "2 tokens from position 95: the context has 96 positions"),
        (0, [1], -1, "from position -1"),
        (0, [1, 23], 0, "ids from 1 to 23: the vocabulary has 23"),
        (0, [-1], 0, "ids from -1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    slot: int, ids: list[int], start: int, message: str
) -> None:
    pipeline, stage = playback()
    with pytest.raises(ValueError, match=message):
        pipeline.prefill(slot, np.array(ids, dtype=np.int64), start)
    assert stage.steps == []
