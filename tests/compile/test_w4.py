"""int4 by groups: tiles, chains and the embedding against the NumPy reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.compile.formats import FORMATS
from buddy_pipeline.compile.target import Target
from tests.compile.harness import (
    ROUNDOFF,
    assert_same_bits,
    host,
    run_embedding,
    run_linear,
    runnable_targets,
)

on_each_target = pytest.mark.parametrize("target", runnable_targets())
in_each_form = pytest.mark.parametrize("form", ["w4g32", "w4g128"])


def random_case(
    tokens: int, depth: int, outputs: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng([tokens, depth, outputs, seed])
    # Off centre, so that zeros of groups are all over.
    weight = random.standard_normal((outputs, depth), np.float32)
    weight += random.standard_normal((outputs, 1), np.float32)
    x = random.standard_normal((tokens, depth), np.float32) + 1
    return x, weight, random.standard_normal(outputs, np.float32)


def check(
    target: Target, x: np.ndarray, weight: np.ndarray, bias: np.ndarray, team: int, form: str
) -> None:
    """Within the error of sums over (16 + code) · x, which are at most 31 steps a weight."""
    got = run_linear(target, x, weight, bias, team, form)
    stored = FORMATS[form]
    x = stored.activation(target).reference(x).astype(np.float64)
    rows = stored.from_f32(weight)
    wide = stored.reference(rows).astype(np.float64)
    expected = x @ wide.T + bias
    steps = np.ptp(weight.reshape(len(weight), -1, stored.unit), axis=2) / 15
    steps = np.maximum(steps, np.abs(weight).max() / 15).max()
    size = np.abs(x).sum(axis=1, keepdims=True) * 47 * steps + np.abs(bias)
    assert (np.abs(got - expected) <= (x.shape[1] + 4) * ROUNDOFF * size).all()


@on_each_target
@in_each_form
@pytest.mark.parametrize("tokens", [*range(1, 18), 29, 130])
def test_every_token_count(target: Target, form: str, tokens: int) -> None:
    x, weight, bias = random_case(tokens, 384, 71)
    check(target, x, weight, bias, 1 + tokens % 3, form)


@on_each_target
@in_each_form
@pytest.mark.parametrize("tokens", [1, 2, 17])
@pytest.mark.parametrize("shape", [(128, 1), (256, 32), (640, 33), (1024, 97)])
def test_blocks_of_depth(target: Target, form: str, tokens: int, shape: tuple[int, int]) -> None:
    x, weight, bias = random_case(tokens, *shape)
    check(target, x, weight, bias, 2, form)


@on_each_target
@in_each_form
def test_small_integers_are_exact(target: Target, form: str) -> None:
    """A group that spans 0 to 15 steps of 1 has scale 1, whatever its zero."""
    random = np.random.default_rng(1)
    zeros = random.integers(0, 16, (99, 3, 1))
    codes = random.integers(0, 16, (99, 3, 128))
    codes[..., 0::32], codes[..., 1::32] = 0, 15
    weight = (codes - zeros).reshape(99, 384).astype(np.float32)
    x = random.integers(-8, 9, (50, 384)).astype(np.float32)
    assert (run_linear(target, x, weight, None, 3, form) == x @ weight.T).all()


@in_each_form
@given(st.integers(1, 40), st.integers(1, 4), st.data())
def test_other_tokens_and_teams_change_no_bit(
    form: str, tokens: int, team: int, data: st.DataObject
) -> None:
    x, weight, bias = random_case(tokens, 512, 100)
    whole = run_linear(host(), x, weight, bias, form=form)
    count = data.draw(st.integers(1, tokens))
    chosen = np.array(data.draw(st.permutations(range(tokens))))[:count]
    assert_same_bits(run_linear(host(), x[chosen], weight, bias, team, form), whole[chosen])


@on_each_target
@in_each_form
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_that_is_not_finite_stays_in_its_row(target: Target, form: str, bad: float) -> None:
    x, weight, bias = random_case(20, 128, 67)
    clean = run_linear(target, x, weight, bias, form=form)
    x[10, 77] = bad
    got = run_linear(target, x, weight, bias, form=form)
    others = np.arange(20) != 10
    assert_same_bits(got[others], clean[others])
    assert not np.isfinite(got[10]).any()


@on_each_target
@pytest.mark.parametrize("form", ["w8a32", "w8a16", "w8a8", "w4g32", "w4g128"])
def test_embedded_rows_are_the_reference_s(target: Target, form: str) -> None:
    depth = 128 if form.startswith("w4") else 45
    _, table, _ = random_case(1, depth, 70)
    ids = np.array([3, 69, 0, 31, 32, 3], np.int64)
    expected = FORMATS[form].reference(FORMATS[form].from_f32(table))
    for team in (1, 2):
        assert_same_bits(run_embedding(target, ids, table, team, form), expected[ids])
