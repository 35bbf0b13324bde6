"""Perplexity is what its definition says, for any cut into blocks."""

import math

import numpy as np
import pytest

from benchkit.perplexity import combine, negative_log_likelihoods, score_window, windows


def test_a_model_that_knows_nothing_is_as_surprised_as_the_vocabulary_is_large() -> None:
    ids = np.arange(9, dtype=np.int64)
    score = score_window(ids, [np.zeros((8, 50), np.float32)])
    assert score.tokens == 8
    assert score.perplexity == pytest.approx(50)


def test_likelihoods_are_those_of_the_softmax() -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((5, 7)).astype(np.float32)
    wanted = np.array([3, 0, 6, 6, 1])
    chances = np.exp(logits.astype(np.float64))
    chances /= chances.sum(axis=1, keepdims=True)
    expected = [-math.log(row[token]) for row, token in zip(chances, wanted, strict=True)]
    np.testing.assert_allclose(negative_log_likelihoods(logits, wanted), expected, rtol=1e-12)


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[3e38, 0.0], [0.0, -3e38]], np.float32)
    assert negative_log_likelihoods(logits, np.array([0, 0])).tolist() == [0.0, 0.0]


def test_each_token_is_predicted_from_the_logits_after_the_one_before() -> None:
    """A model that always expects the following number is not surprised by counting."""
    ids = np.arange(7, dtype=np.int64)
    sure = np.full((6, 8), -100.0, np.float32)
    sure[np.arange(6), ids[1:]] = 100.0
    assert score_window(ids, [sure]).perplexity == pytest.approx(1)


def test_blocks_of_logits_do_not_change_the_score() -> None:
    random = np.random.default_rng(1)
    logits = random.standard_normal((10, 11)).astype(np.float32)
    ids = random.integers(0, 11, 11)
    whole = score_window(ids, [logits])
    cut = score_window(ids, [logits[:3], logits[3:4], logits[4:]])
    assert cut.tokens == whole.tokens
    assert cut.perplexity == pytest.approx(whole.perplexity)


def test_missing_logits_are_an_error() -> None:
    with pytest.raises(ValueError, match="logits after 2 tokens for a piece of 5"):
        score_window(np.arange(5), [np.zeros((2, 8), np.float32)])


def test_windows_cover_the_text_and_start_with_what_the_model_wants() -> None:
    assert [w.tolist() for w in windows([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4]]
    pieces = [w.tolist() for w in windows([1, 2, 3, 4, 5], 2, [9])]
    assert pieces == [[9, 1, 2], [9, 3, 4], [9, 5]]


def test_pieces_weigh_by_their_tokens() -> None:
    sure = score_window(np.array([0, 0, 0, 0]), [np.array([[100.0, 0.0]] * 3, np.float32)])
    unsure = score_window(np.array([0, 1]), [np.zeros((1, 2), np.float32)])
    assert combine([sure, unsure]).tokens == 4
    assert combine([sure, unsure]).perplexity == pytest.approx(2 ** (1 / 4))
