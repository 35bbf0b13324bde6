"""GGUF's formats against the `gguf` package, and linears on them against their own definition."""

import numpy as np
import pytest

from buddy_pipeline.compile.formats import FORMATS
from buddy_pipeline.compile.formats.activation import Plain
from buddy_pipeline.compile.formats.block_layout import BLOCK
from buddy_pipeline.compile.formats.blocks import BlockFormat
from buddy_pipeline.compile.formats.integer_activation import IntegerBlocks
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
INTEGER_FORMS = [n for n, f in BLOCK_FORMATS.items() if f.activation_bits < 32]
SOURCES = {f.source: f.unit for f in BLOCK_FORMATS.values()}

on_each_target = pytest.mark.parametrize("target", runnable_targets())
in_each_source = pytest.mark.parametrize("source", SOURCES)
in_each_integer_form = pytest.mark.parametrize("form", INTEGER_FORMS)
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
@in_each_integer_form
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 6, 7, 8, 13, 40, 130])
def test_linears_are_within_rounding_of_their_definition(
    target: Target, form: str, tokens: int
) -> None:
    """Activations as packed, weights as dequantised: what remains is the rounding of one number a
    run of codes, and that of the chain."""
    block_form = BLOCK_FORMATS[form]
    depth = {32: 608, 256: 768}[block_form.unit]
    rows = random_blocks(block_form.source, 71, depth)
    x, bias = activations(tokens, depth), activations(1, 71)[0]
    got = run_linear_rows(target, x, rows, bias, 1 + tokens % 3, form)
    activation = block_form.activation(target)
    packed = activation.reference(x).astype(np.float64)
    weight = block_form.reference(rows).astype(np.float64)
    steps = depth if isinstance(activation, Plain) else 6 * depth // 16
    size = np.abs(packed) @ _magnitude(rows, block_form).T + np.abs(bias)
    error = np.abs(got - (packed @ weight.T + bias))
    assert (error <= steps * ROUNDOFF * size).all()


def _magnitude(rows: np.ndarray, form: BlockFormat) -> np.ndarray:
    """|scale · (code - zero)| + |minimum|, which may cancel in the weight."""
    fields = form.fields(rows.reshape(len(rows), -1, form.file_bytes))
    weight = np.abs(form.reference(rows).astype(np.float64))
    if not form.has_minimum:
        return weight
    minimum = np.abs(form.minimum(fields).astype(np.float64)).reshape(len(rows), -1)
    return weight + 2 * np.repeat(minimum, BLOCK, axis=1)


@on_each_target
@in_each_integer_form
def test_linears_are_within_the_bound_of_their_activations(target: Target, form: str) -> None:
    """Activations are off by at most half a step of their block: 1/254 of its largest in 8 bits,
    1/65024 in 16."""
    source, unit = BLOCK_FORMATS[form].source, BLOCK_FORMATS[form].unit
    depth = 3 * max(unit, 64)
    rows, x = random_blocks(source, 50, depth), activations(9, depth)
    got = run_linear_rows(target, x, rows, None, 2, form)
    weight = dequantized(rows, source).astype(np.float64)
    largest = np.abs(x.reshape(9, -1, BLOCK)).max(axis=-1).astype(np.float64)
    steps = {8: 254, 16: 65024}[BLOCK_FORMATS[form].activation_bits]
    bound = np.repeat(largest / steps, BLOCK, axis=1) @ np.abs(weight).T
    rounding = depth * ROUNDOFF * np.abs(x) @ _magnitude(rows, BLOCK_FORMATS[form]).T
    assert (np.abs(got - x.astype(np.float64) @ weight.T) <= bound + rounding).all()


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
@in_each_integer_form
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-36, 1e-33, 1e-30, 1e30])
def test_tiny_and_huge_activations(target: Target, form: str, size: float) -> None:
    source = BLOCK_FORMATS[form].source
    depth = SOURCES[source]
    rows, x = random_blocks(source, 40, depth), activations(3, depth) * np.float32(size)
    got = run_linear_rows(target, x, rows, None, 1, form)
    weight = dequantized(rows, source).astype(np.float64)
    size_of = np.abs(x).max() * np.abs(weight).sum(axis=1)
    too_small = {8: 1e-35, 16: 3e-34}[BLOCK_FORMATS[form].activation_bits]
    allowed = size_of / 100 + too_small * np.abs(weight).sum(axis=1)
    assert (np.abs(got - x.astype(np.float64) @ weight.T) <= allowed).all()


@on_each_target
@in_each_integer_form
def test_the_largest_sums_do_not_overflow(target: Target, form: str) -> None:
    """All elements of a block at their greatest, with both signs, on the codes of both ends."""
    source = BLOCK_FORMATS[form].source
    depth = SOURCES[source]
    rows = extreme_blocks(source, depth)
    rows = rows[np.isfinite(dequantized(rows, source)).all(axis=1)]
    x = np.ones((3, depth), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    got = run_linear_rows(target, x, rows, None, 1, form)
    exact = x.astype(np.float64) @ dequantized(rows, source).astype(np.float64).T
    allowed = 1e-4 * np.abs(x) @ _magnitude(rows, BLOCK_FORMATS[form]).T
    assert (np.abs(got - exact) <= allowed).all()


@on_each_target
@pytest.mark.parametrize("form", ["q8_0", "q8_0_a16", "q8_0_exact"])
@pytest.mark.parametrize("depth", [1, 30, 45, 100])
def test_rows_may_end_inside_a_block(target: Target, form: str, depth: int) -> None:
    """A table of any width that is also the head's matrix: looked up and multiplied with."""
    weight = np.random.default_rng(depth).standard_normal((40, depth), np.float32)
    rows = FORMATS[form].from_f32(weight)
    values = FORMATS[form].reference(rows)[:, :depth]
    ids = np.array([3, 39, 0], np.int64)
    assert_same_bits(run_embedding_rows(target, ids, rows, depth, 2, form), values[ids])
    x = np.random.default_rng(0).standard_normal((5, depth), np.float32)
    got = run_linear_rows(target, x, rows, None, 2, form)
    packed = FORMATS[form].activation(target).reference(x).astype(np.float64)
    size = np.abs(packed) @ np.abs(values).T
    assert (np.abs(got - packed @ values.T.astype(np.float64)) <= 2 * depth * ROUNDOFF * size).all()


EACH_WAY = [
    IntegerBlocks(parts, bias, scaled, run)
    for parts in (1, 2)
    for bias, scaled, run in ((0, False, 32), (8, False, 32), (0, True, 32), (32, False, 16))
]


@pytest.mark.parametrize("activation", EACH_WAY, ids=str)
def test_packed_activations_are_off_by_half_a_step(activation: IntegerBlocks) -> None:
    x = activations(50, 256)
    largest = np.repeat(np.abs(x.reshape(50, -1, BLOCK)).max(axis=-1), BLOCK, axis=1)
    step = largest / {1: 127, 2: 32512}[activation.parts]
    rounding = largest * 2 * ROUNDOFF  # of step · integer
    assert (np.abs(activation.reference(x) - x) <= 0.5001 * step + rounding).all()


def test_all_forms_read_the_same_memory() -> None:
    """So that --exact needs no packing of its own."""
    for source in SOURCES:
        sizes = {FORMATS[source + suffix].unit_bytes(32) for suffix in ("", "_a16", "_exact")}
        assert len(sizes) == 1
