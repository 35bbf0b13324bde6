"""Perplexity: how surprised a model is by a text, from the logits after each of its tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Score:
    """What a model made of a text."""

    tokens: int
    """Tokens that were predicted."""
    negative_log_likelihood: float
    """Sum over them, natural logarithm."""

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.negative_log_likelihood / self.tokens)


def windows(ids: Sequence[int], length: int, beginning: Sequence[int] = ()) -> Iterator[np.ndarray]:
    """The text's tokens in pieces of at most `length`, each after `beginning`, int64.

    Each piece is scored by itself: its first token is given, the others are predicted; one with
    nothing to predict is left out.
    """
    for start in range(0, len(ids), length):
        piece = np.array([*beginning, *ids[start : start + length]], dtype=np.int64)
        if len(piece) > 1:
            yield piece


def score_window(ids: np.ndarray, logits: Iterable[np.ndarray]) -> Score:
    """The score of one piece, int64 [n].

    logits: blocks of float32 [tokens, vocab] after its first n - 1 tokens, in order.
    """
    total, at = 0.0, 1
    for block in logits:
        wanted = ids[at : at + len(block)]
        total += float(negative_log_likelihoods(block, wanted).sum())
        at += len(block)
    if at != len(ids):
        raise ValueError(f"logits after {at - 1} tokens for a piece of {len(ids)}")
    return Score(len(ids) - 1, total)


def negative_log_likelihoods(logits: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """-log softmax(logits)[wanted], float64 [tokens], for float32 [tokens, vocab] and int64
    [tokens]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    sums = np.log(np.exp(wide - top[:, None]).sum(axis=1)) + top
    return sums - wide[np.arange(len(wanted)), wanted]


def combine(scores: Iterable[Score]) -> Score:
    """The score of all pieces together."""
    listed = list(scores)
    return Score(sum(s.tokens for s in listed), sum(s.negative_log_likelihood for s in listed))
