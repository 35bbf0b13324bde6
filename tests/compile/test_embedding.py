"""The embedding kernel gathers rows, bit by bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.compile.target import Target
from tests.compile.harness import (
    assert_same_bits,
    host,
    rounded,
    run_embedding,
    runnable_targets,
)


def table(rows: int, depth: int) -> np.ndarray:
    """Random bits, NaN of every payload among them."""
    random = np.random.default_rng([rows, depth])
    return random.integers(0, 2**32, (rows, depth), np.uint32).view(np.float32)


@pytest.mark.parametrize("target", runnable_targets())
def test_first_last_and_repeated_rows(target: Target) -> None:
    words = table(261, 45)
    ids = np.array([0, 260, 31, 32, 33, 0, 260], np.int64)
    for team in (1, 2, 3):
        assert_same_bits(run_embedding(target, ids, words, team), words[ids])


@pytest.mark.parametrize("target", runnable_targets())
@pytest.mark.parametrize("form", ["bf16", "f16"])
def test_halves_are_widened(target: Target, form: str) -> None:
    words = np.random.default_rng(0).standard_normal((70, 45), np.float32)
    words[3, :4] = [np.inf, -np.inf, 1e-7, -0.0]
    ids = np.array([3, 69, 0, 31, 32], np.int64)
    assert_same_bits(run_embedding(target, ids, words, 2, form), rounded(words, form)[ids])


@given(st.integers(1, 100), st.integers(1, 70), st.integers(1, 40), st.integers(1, 5))
def test_random_shapes(rows: int, depth: int, tokens: int, team: int) -> None:
    words = table(rows, depth)
    ids = np.random.default_rng(tokens).integers(0, rows, tokens, np.int64)
    assert_same_bits(run_embedding(host(), ids, words, team), words[ids])
