"""GGUF's formats against the `gguf` package, and linears on them against their own definition."""

import numpy as np
import pytest

from buddy_pipeline.compile.formats import FORMATS
from buddy_pipeline.compile.formats.activation import Q8, Q8_BLOCK, Plain
from buddy_pipeline.compile.formats.blocks import BlockFormat
from buddy_pipeline.compile.target import Target
from tests.compile.gguf_blocks import dequantized, extreme_blocks, random_blocks
from tests.compile.harness import (
    ROUNDOFF,
    assert_same_bits,
    run_embedding_rows,
    run_linear,
    run_linear_rows,
    runnable_targets,
)

BLOCK_FORMATS = {n: f for n, f in FORMATS.items() if isinstance(f, BlockFormat)}
SOURCES = {f.source: f.unit for f in BLOCK_FORMATS.values()}

on_each_target = pytest.mark.parametrize("target", runnable_targets())
in_each_source = pytest.mark.parametrize("source", SOURCES)
in_each_form = pytest.mark.parametrize("form", BLOCK_FORMATS)


def activations(tokens: int, depth: int) -> np.ndarray:
    random = np.random.default_rng([tokens, depth])
    x = random.standard_normal((tokens, depth), np.float32)
    x[:, random.integers(0, depth, 3)] *= 50  # channels that stand out, as real ones do
    return x


def same_numbers(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal in every bit, but for which NaN it is."""
    equal = left.view(np.uint32) == right.view(np.uint32)
    return bool((equal | (np.isnan(left) & np.isnan(right))).all())


@in_each_source
def test_reference_is_the_gguf_package_s(source: str) -> None:
    depth = 2 * SOURCES[source]
    for rows in (random_blocks(source, 40, depth), extreme_blocks(source, depth)):
        assert same_numbers(FORMATS[source].reference(rows), dequantized(rows, source))


@on_each_target
@in_each_form
@pytest.mark.parametrize("team", [1, 3])
def test_every_element_is_decoded_bit_by_bit(target: Target, form: str, team: int) -> None:
    source, depth = BLOCK_FORMATS[form].source, 3 * BLOCK_FORMATS[form].unit
    rows = extreme_blocks(source, depth)
    ids = np.array([*range(len(rows)), 0, 5], np.int64)
    got = run_embedding_rows(target, ids, rows, depth, team, form)
    assert same_numbers(got, dequantized(rows, source)[ids])


@on_each_target
@in_each_source
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 13, 40, 130])
def test_exact_linears_are_f32_linears_bit_by_bit(target: Target, source: str, tokens: int) -> None:
    depth = {32: 608, 256: 768}[SOURCES[source]]
    rows = random_blocks(source, 71, depth)
    x, bias = activations(tokens, depth), activations(1, 71)[0]
    got = run_linear_rows(target, x, rows, bias, 1 + tokens % 3, f"{source}_exact")
    assert_same_bits(got, run_linear(target, x, dequantized(rows, source), bias))


@on_each_target
@in_each_source
def test_exact_tiles_decode_extreme_blocks(target: Target, source: str) -> None:
    """Each weight meets a one alone: the column of a token is the weight."""
    depth = SOURCES[source]
    rows = extreme_blocks(source, depth)
    finite = np.isfinite(dequantized(rows, source)).all(axis=1)
    got = run_linear_rows(target, np.eye(depth, dtype=np.float32), rows, None, 2, f"{source}_exact")
    expected = dequantized(rows, source).T
    assert (got[:, finite] == expected[:, finite]).all()  # 0 where the reference has -0


@on_each_target
@in_each_source
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 6, 7, 8, 13, 40, 130])
def test_linears_are_within_rounding_of_their_definition(
    target: Target, source: str, tokens: int
) -> None:
    """Activations as packed, weights as dequantised: what remains is the rounding of one number a
    run of codes, and that of the chain."""
    form = FORMATS[source]
    depth = {32: 608, 256: 768}[form.unit]
    rows = random_blocks(source, 71, depth)
    x, bias = activations(tokens, depth), activations(1, 71)[0]
    got = run_linear_rows(target, x, rows, bias, 1 + tokens % 3, source)
    packed = form.activation(target).reference(x).astype(np.float64)
    weight = form.reference(rows).astype(np.float64)
    steps = depth if isinstance(form.activation(target), Plain) else 6 * depth // 16
    size = np.abs(packed) @ _magnitude(rows, form).T + np.abs(bias)
    error = np.abs(got - (packed @ weight.T + bias))
    assert (error <= steps * ROUNDOFF * size).all()


def _magnitude(rows: np.ndarray, form: object) -> np.ndarray:
    """|scale · (code - zero)| + |minimum|, which may cancel in the weight."""
    assert isinstance(form, BlockFormat)
    fields = form.fields(rows.reshape(len(rows), -1, form.file_bytes))
    weight = np.abs(form.reference(rows).astype(np.float64))
    if not form.has_minimum:
        return weight
    minimum = np.abs(form.minimum(fields).astype(np.float64)).reshape(len(rows), -1)
    return weight + 2 * np.repeat(minimum, Q8_BLOCK, axis=1)


@on_each_target
@in_each_source
def test_linears_are_within_the_bound_of_their_activations(target: Target, source: str) -> None:
    """int8 activations are off by at most half a step of their block, 1/254 of its largest."""
    form = FORMATS[source]
    depth = 3 * max(form.unit, 64)
    rows, x = random_blocks(source, 50, depth), activations(9, depth)
    got = run_linear_rows(target, x, rows, None, 2, source)
    weight = dequantized(rows, source).astype(np.float64)
    largest = np.abs(x.reshape(9, -1, Q8_BLOCK)).max(axis=-1)
    each = np.repeat(largest / 254, Q8_BLOCK, axis=1).astype(np.float64)
    bound = each @ np.abs(weight).T
    assert (np.abs(got - x.astype(np.float64) @ weight.T) <= 1.001 * bound).all()


@on_each_target
@in_each_form
def test_a_token_has_the_same_bits_alone_and_in_any_batch(target: Target, form: str) -> None:
    depth = {32: 320, 256: 512}[BLOCK_FORMATS[form].unit]
    rows = random_blocks(BLOCK_FORMATS[form].source, 71, depth)
    x, bias = activations(140, depth), activations(1, 71)[0]
    alone = np.concatenate([run_linear_rows(target, r[None], rows, bias, 1, form) for r in x[:20]])
    whole = run_linear_rows(target, x, rows, bias, 3, form)
    assert_same_bits(whole[:20], alone)
    for tokens in [*range(2, 20), 55, 127]:
        got = run_linear_rows(target, x[:tokens], rows, bias, 1 + tokens % 2, form)
        assert_same_bits(got, whole[:tokens])


@on_each_target
@in_each_form
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_stays_in_its_row(target: Target, form: str, bad: float) -> None:
    depth = 2 * BLOCK_FORMATS[form].unit
    rows, x = random_blocks(BLOCK_FORMATS[form].source, 40, depth), activations(5, depth)
    clean = run_linear_rows(target, x, rows, None, 1, form)
    x[2, depth - 1] = bad
    got = run_linear_rows(target, x, rows, None, 1, form)
    others = np.arange(5) != 2
    assert_same_bits(got[others], clean[others])
    assert not np.isfinite(got[2]).any() or form.endswith("_exact")


@on_each_target
@in_each_source
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-30, 1e30])
def test_tiny_and_huge_activations(target: Target, source: str, size: float) -> None:
    depth = SOURCES[source]
    rows, x = random_blocks(source, 40, depth), activations(3, depth) * np.float32(size)
    got = run_linear_rows(target, x, rows, None, 1, source)
    weight = dequantized(rows, source).astype(np.float64)
    size_of = np.abs(x).max() * np.abs(weight).sum(axis=1)
    assert (np.abs(got - x.astype(np.float64) @ weight.T) <= size_of / 100 + 1e-35).all()


@pytest.mark.parametrize("activation", [Q8(), Q8(bias=8), Q8(scaled=True), Q8(bias=32, run=16)])
def test_packed_activations_are_off_by_half_a_step(activation: Q8) -> None:
    x = activations(50, 256)
    step = np.repeat(np.abs(x.reshape(50, -1, Q8_BLOCK)).max(axis=-1), Q8_BLOCK, axis=1) / 127
    assert (np.abs(activation.reference(x) - x) <= 0.5001 * step).all()


def test_two_forms_read_the_same_memory() -> None:
    """So that --exact needs no packing of its own."""
    for source in SOURCES:
        assert FORMATS[source].unit_bytes(32) == FORMATS[f"{source}_exact"].unit_bytes(32)
