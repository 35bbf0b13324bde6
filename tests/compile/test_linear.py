"""The linear kernel against NumPy in float64, and one token's result whatever is around it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.compile.formats import FORMATS
from buddy_pipeline.compile.formats.integer_activation import IntegerBlocks
from buddy_pipeline.compile.target import Target
from tests.compile.harness import (
    ROUNDOFF,
    Epilogue,
    assert_same_bits,
    host,
    run_linear,
    run_linear_rows,
    runnable_targets,
)

on_each_target = pytest.mark.parametrize("target", runnable_targets())
in_each_form = pytest.mark.parametrize(
    "form", ["f32", "bf16", "bf16_exact", "f16", "w8a32", "w8a16", "w8a8"]
)
in_each_float_form = pytest.mark.parametrize("form", ["f32", "bf16", "bf16_exact", "f16"])


def random_case(
    tokens: int, depth: int, outputs: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng([tokens, depth, outputs, seed])
    x = random.standard_normal((tokens, depth), np.float32)
    weight = random.standard_normal((outputs, depth), np.float32)
    return x, weight, random.standard_normal(outputs, np.float32)


def check(
    target: Target,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    team: int,
    form: str = "f32",
) -> None:
    """Within the error of one chain of `depth` roundings, each of at most half a unit, on numbers
    that are rounded to what the format multiplies."""
    got = run_linear(target, x, weight, bias, team, form)
    stored = FORMATS[form]
    x = stored.activation(target).reference(x)
    wide, added = stored.reference(stored.from_f32(weight)).astype(np.float64), 0.0
    if bias is not None:
        added = bias.astype(np.float64)
    expected = x.astype(np.float64) @ wide.T + added
    size = np.abs(x).astype(np.float64) @ np.abs(wide).T + np.abs(added)
    roundings = x.shape[1] + 1 + FORMATS[form].scaled
    assert (np.abs(got - expected) <= roundings * ROUNDOFF * size).all()


@on_each_target
@in_each_form
@pytest.mark.parametrize("tokens", [*range(1, 41), 125, 127, 300])
def test_every_token_count(target: Target, form: str, tokens: int) -> None:
    x, weight, bias = random_case(tokens, 45, 71)
    check(target, x, weight, bias if tokens % 2 else None, 1 + tokens % 3, form)


@on_each_target
@in_each_form
@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 130])
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 200), (255, 33), (256, 32), (257, 31), (700, 97), (1025, 5)]
)
def test_odd_sizes_and_blocks_of_depth(
    target: Target, form: str, tokens: int, shape: tuple[int, int]
) -> None:
    x, weight, bias = random_case(tokens, *shape)
    check(target, x, weight, bias, 2, form)
    check(target, x, weight, None, 1, form)


@on_each_target
@in_each_form
def test_small_integers_are_exact(target: Target, form: str) -> None:
    random = np.random.default_rng(1)
    x, weight = (
        random.integers(-8, 9, shape).astype(np.float32) for shape in [(50, 333), (99, 333)]
    )
    weight[:, 7] = x[:, ::32] = 127  # makes scales of int8 1
    assert (run_linear(target, x, weight, None, 3, form) == x @ weight.T).all()


sizes = st.tuples(st.integers(1, 60), st.integers(1, 600), st.integers(1, 150))


@in_each_form
@given(sizes, st.booleans(), st.integers(1, 4), st.integers(0, 99))
def test_random_shapes(
    form: str, size: tuple[int, int, int], with_bias: bool, team: int, seed: int
) -> None:
    x, weight, bias = random_case(*size, seed)
    check(host(), x, weight, bias if with_bias else None, team, form)


@on_each_target
@in_each_form
@pytest.mark.parametrize("depth", [45, 300])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(
    target: Target, form: str, depth: int
) -> None:
    x, weight, bias = random_case(140, depth, 71)
    alone = np.concatenate([run_linear(target, row[None], weight, bias, form=form) for row in x])
    for tokens in [*range(2, 20), 55, 127, 140]:
        got = run_linear(target, x[:tokens], weight, bias, form=form)
        assert_same_bits(got, alone[:tokens])


@on_each_target
@in_each_form
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 14, 15, 16, 17, 33, 127, 300])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_an_epilogue_gets_every_output_once_with_the_bits_it_has_elsewhere(
    target: Target, form: str, tokens: int, group: int
) -> None:
    """One part of K and several, few groups and many, more threads than groups."""
    for depth, panels, team in ((45, 6, 1), (45, 6, 3), (2500, 6, 2), (70, 18, 2)):
        x, weight, bias = random_case(tokens, depth, panels * target.panel - 3)
        rows = FORMATS[form].from_f32(weight)
        epilogue = Epilogue(target, tokens, panels, group)
        got = run_linear_rows(target, x, rows, bias, team, form, epilogue)
        assert_same_bits(got, run_linear_rows(target, x, rows, bias, 1, form))


@in_each_float_form
def test_depths_that_are_packed_in_parts_change_no_bit(form: str) -> None:
    x, weight, bias = random_case(300, 3850, 71)
    many = run_linear(host(), x, weight, bias, form=form)
    for first, last in ((0, 1), (0, 3), (7, 23), (40, 90)):
        assert_same_bits(
            run_linear(host(), x[first:last], weight, bias, form=form), many[first:last]
        )


@in_each_float_form
@pytest.mark.parametrize("scale", [1e-20, 1e-38])
def test_tiny_products_have_the_same_bits_in_any_batch(form: str, scale: float) -> None:
    """Products, sums and elements below the least normal number, on the host's own units."""
    x, weight, bias = random_case(40, 611, 71)
    tiny = np.float32(scale), np.float32(1e-19), np.float32(1e-39)
    x, weight, bias = x * tiny[0], weight * np.exp(4 * weight) * tiny[1], bias * tiny[2]
    many = run_linear(host(), x, weight, bias, form=form)
    for tokens in range(1, 6):
        got = run_linear(host(), x[:tokens], weight, bias, form=form)
        assert_same_bits(got, many[:tokens])


@in_each_float_form
@pytest.mark.parametrize("depth", [2, 30, 31, 32, 34, 66])
def test_a_zero_has_the_same_sign_in_any_batch(form: str, depth: int) -> None:
    """Products too small for any number, and a bias below zero."""
    x = np.full((40, depth), -1e-30, np.float32)
    weight = np.full((33, depth), 1e-9, np.float32)
    for bias in (-0.0, -1e-40):
        each = np.full(33, bias, np.float32)
        many = run_linear(host(), x, weight, each, form=form)
        for tokens in (1, 2, 3, 4, 17):
            assert_same_bits(run_linear(host(), x[:tokens], weight, each, form=form), many[:tokens])


@in_each_form
@given(sizes, st.integers(1, 4), st.data())
def test_other_tokens_and_teams_change_no_bit(
    form: str, size: tuple[int, int, int], team: int, data: st.DataObject
) -> None:
    x, weight, bias = random_case(*size)
    whole = run_linear(host(), x, weight, bias, form=form)
    count = data.draw(st.integers(1, size[0]))
    chosen = np.array(data.draw(st.permutations(range(size[0]))))[:count]
    got = run_linear(host(), x[chosen], weight, bias, team, form)
    assert_same_bits(got, whole[chosen])


@on_each_target
@in_each_form
@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_stays_in_its_row(
    target: Target, form: str, tokens: int, bad: float
) -> None:
    x, weight, bias = random_case(tokens, 75, 67)
    clean = run_linear(target, x, weight, bias, form=form)
    row = tokens // 2
    x[row, 74] = bad  # the last of an odd depth: its partner in a bf16 pair is padding
    got = run_linear(target, x, weight, bias, form=form)
    others = np.arange(tokens) != row
    assert_same_bits(got[others], clean[others])
    int8 = isinstance(FORMATS[form].activation(target), IntegerBlocks)
    if np.isnan(bad) or int8:
        assert np.isnan(got[row]).all()
    else:
        with np.errstate(invalid="ignore"):
            expected = FORMATS[form].reference(FORMATS[form].from_f32(weight))[:, 74] * bad
        assert np.array_equal(got[row], expected, equal_nan=True)


@on_each_target
@in_each_float_form
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_a_weight_that_is_not_finite_stays_in_its_column(
    target: Target, form: str, tokens: int
) -> None:
    x, weight, bias = random_case(tokens, 75, 67)
    clean = run_linear(target, x, weight, bias, form=form)
    weight[41, 3], weight[66, 74] = np.nan, np.inf
    got = run_linear(target, x, weight, bias, form=form)
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
