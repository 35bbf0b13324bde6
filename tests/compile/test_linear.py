"""The linear kernel against NumPy in float64, and one token's result whatever is around it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.compile.target import Target
from tests.compile.harness import (
    ROUNDOFF,
    assert_same_bits,
    host,
    run_linear,
    runnable_targets,
)

on_each_target = pytest.mark.parametrize("target", runnable_targets())


def random_case(
    tokens: int, depth: int, outputs: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng([tokens, depth, outputs, seed])
    x = random.standard_normal((tokens, depth), np.float32)
    weight = random.standard_normal((outputs, depth), np.float32)
    return x, weight, random.standard_normal(outputs, np.float32)


def check(target: Target, x: np.ndarray, w: np.ndarray, b: np.ndarray | None, team: int) -> None:
    """Within the error of one chain of `depth` roundings, each of at most half a unit."""
    got = run_linear(target, x, w, b, team)
    wide, added = w.astype(np.float64), 0.0 if b is None else b.astype(np.float64)
    expected = x.astype(np.float64) @ wide.T + added
    size = np.abs(x).astype(np.float64) @ np.abs(wide).T + np.abs(added)
    assert (np.abs(got - expected) <= x.shape[1] * ROUNDOFF * size).all()


@on_each_target
@pytest.mark.parametrize("tokens", [*range(1, 41), 125, 127, 300])
def test_every_token_count(target: Target, tokens: int) -> None:
    x, weight, bias = random_case(tokens, 45, 71)
    check(target, x, weight, bias if tokens % 2 else None, team=1 + tokens % 3)


@on_each_target
@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 130])
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 200), (255, 33), (256, 32), (257, 31), (700, 97), (1025, 5)]
)
def test_odd_sizes_and_blocks_of_depth(target: Target, tokens: int, shape: tuple[int, int]) -> None:
    x, weight, bias = random_case(tokens, *shape)
    check(target, x, weight, bias, team=2)
    check(target, x, weight, None, team=1)


@on_each_target
def test_small_integers_are_exact(target: Target) -> None:
    random = np.random.default_rng(1)
    x, weight = (
        random.integers(-8, 9, shape).astype(np.float32) for shape in [(50, 333), (99, 333)]
    )
    assert (run_linear(target, x, weight, team=3) == x @ weight.T).all()


sizes = st.tuples(st.integers(1, 60), st.integers(1, 600), st.integers(1, 150))


@given(sizes, st.booleans(), st.integers(1, 4), st.integers(0, 99))
def test_random_shapes(size: tuple[int, int, int], with_bias: bool, team: int, seed: int) -> None:
    x, weight, bias = random_case(*size, seed)
    check(host(), x, weight, bias if with_bias else None, team)


@on_each_target
@pytest.mark.parametrize("depth", [45, 300])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(target: Target, depth: int) -> None:
    x, weight, bias = random_case(140, depth, 71)
    alone = np.concatenate([run_linear(target, row[None], weight, bias) for row in x])
    for tokens in [*range(2, 20), 55, 127, 140]:
        assert_same_bits(run_linear(target, x[:tokens], weight, bias), alone[:tokens])


@given(sizes, st.integers(1, 4), st.data())
def test_chunks_and_teams_change_no_bit(
    size: tuple[int, int, int], team: int, data: st.DataObject
) -> None:
    x, weight, bias = random_case(*size)
    whole = run_linear(host(), x, weight, bias)
    cut = data.draw(st.integers(1, size[0]))
    order = np.array(data.draw(st.permutations(range(size[0]))))
    chosen = order[:cut]
    assert_same_bits(run_linear(host(), x[chosen], weight, bias, team), whole[chosen])


@on_each_target
@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_stays_in_its_row(
    target: Target, tokens: int, bad: float
) -> None:
    x, weight, bias = random_case(tokens, 75, 67)
    clean = run_linear(target, x, weight, bias)
    row = tokens // 2
    x[row, 70] = bad
    got = run_linear(target, x, weight, bias)
    others = np.arange(tokens) != row
    assert_same_bits(got[others], clean[others])
    expected = np.isnan(bad) or np.sign(weight[:, 70]) * bad
    if np.isnan(bad):
        assert np.isnan(got[row]).all()
    else:
        assert (got[row] == expected).all()


@on_each_target
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_weight_that_is_not_finite_stays_in_its_column(target: Target, tokens: int) -> None:
    x, weight, bias = random_case(tokens, 75, 67)
    clean = run_linear(target, x, weight, bias)
    weight[41, 3], weight[66, 74] = np.nan, np.inf
    got = run_linear(target, x, weight, bias)
    others = np.setdiff1d(np.arange(67), [41, 66])
    assert_same_bits(got[:, others], clean[:, others])
    assert np.isnan(got[:, 41]).all()
    assert (got[:, 66] == np.sign(x[:, 74]) * np.inf).all()


@on_each_target
def test_huge_and_tiny_values(target: Target) -> None:
    """Overflow gives infinity, and subnormal products are not flushed to zero."""
    x = np.array([[3e38, 1e-38], [3e38, 0.0]], np.float32)
    weight = np.array([[2.0, 0.0], [0.0, 1e-3]], np.float32)
    got = run_linear(target, x, weight)
    assert (got[:, 0] == np.inf).all()
    assert got[0, 1] == np.float32(1e-38) * np.float32(1e-3) > 0
    assert got[1, 1] == 0.0
