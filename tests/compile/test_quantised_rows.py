"""How rows are quantised: reference arithmetic in NumPy, random and extreme."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from buddy_pipeline.compile.formats import FORMATS, elements_a_byte
from buddy_pipeline.compile.formats.quantised_rows import (
    ROW_FORMATS,
    Int4Rows,
    Int8Blocks,
    Int8Rows,
    join_records,
    record_bytes,
    split_records,
)

in_each_form = pytest.mark.parametrize("name", ROW_FORMATS)
finite = st.floats(-1e4, 1e4, width=32)


def random_rows(outputs: int, depth: int) -> np.ndarray:
    random = np.random.default_rng([outputs, depth])
    return random.standard_normal((outputs, depth), np.float32)


@in_each_form
def test_a_record_is_its_fields(name: str) -> None:
    form = ROW_FORMATS[name]
    records = form.quantise(random_rows(7, 256))
    assert records.dtype == np.uint8
    assert records.shape == (7, record_bytes(form, 256))
    assert form.depth(records.shape[1]) == 256
    fields = split_records(form, records)
    assert list(fields) == list(form.fields(256))
    assert (join_records(list(fields.values())) == records).all()


@in_each_form
def test_what_is_quantised_already_stays_as_it_is(name: str) -> None:
    form = ROW_FORMATS[name]
    once = form.dequantise(form.quantise(random_rows(9, 128)))
    again = form.dequantise(form.quantise(once))
    assert np.abs(again - once).max() <= 1e-6 * np.abs(once).max()


@given(arrays(np.float32, (3, 40), elements=finite))
def test_int8_is_within_half_a_step(rows: np.ndarray) -> None:
    values = Int8Rows().dequantise(Int8Rows().quantise(rows))
    step = np.abs(rows).max(axis=1, keepdims=True) / 127
    assert (np.abs(values - rows) <= 0.5001 * step + 1e-44).all()


@given(arrays(np.float32, (3, 64), elements=finite))
@example(np.full((3, 64), 1.2e-6, np.float32))
def test_int4_is_within_a_step(rows: np.ndarray) -> None:
    """Half a step each of the code and of the zero, and what an f16 scale is off by: numbers up to
    128 · 2⁻²⁵ have none, and become zeros."""
    form = Int4Rows(32)
    values = form.dequantise(form.quantise(rows)).reshape(3, 2, 32)
    groups = rows.reshape(3, 2, 32)
    step = (np.maximum(groups.max(2), 0) - np.minimum(groups.min(2), 0)) / 15
    assert (np.abs(values - groups) <= 1.02 * step[..., None] + 4e-6).all()


def test_int4_codes_are_exact_where_the_range_is_whole() -> None:
    rows = np.tile(np.arange(-5, 11, dtype=np.float32), (2, 4))
    form = Int4Rows(32)
    records = form.quantise(rows)
    assert (form.dequantise(records) == rows).all()
    assert (form.codes(records) == rows + 5).all()


@in_each_form
def test_zeros_and_tiny_numbers_become_zeros(name: str) -> None:
    form = ROW_FORMATS[name]
    rows = np.zeros((2, 128), np.float32)
    rows[1] = 1e-45
    assert (form.dequantise(form.quantise(rows)) == 0).all()


@pytest.mark.parametrize("size", [1e-45, 1e-42, 1e-38, 1e-36, 1e-9])
def test_blocks_of_int8_without_a_scale_have_codes_of_zeros(size: float) -> None:
    """And no warning, which a user would see, on the way there."""
    rows = random_rows(3, 96)
    rows[1, 32:64] *= np.float32(size)
    with np.errstate(all="raise", under="ignore"):
        records = Int8Blocks().quantise(rows)
    assert not records[1, 34:68].any()
    rows[1, 32:64] = 0
    assert (records == Int8Blocks().quantise(rows)).all()


@in_each_form
@pytest.mark.parametrize(
    ("bad", "what"), [(np.nan, "NaN"), (np.inf, "an infinity"), (-np.inf, "an infinity")]
)
def test_what_is_not_finite_cannot_be_quantised(name: str, bad: float, what: str) -> None:
    rows = random_rows(3, 128)
    rows[1, 5] = bad
    with pytest.raises(ValueError, match=f"holds {what}, .*: mend the weights"):
        ROW_FORMATS[name].quantise(rows)


@pytest.mark.parametrize("name", ["q8_0", "w4g32"])
@pytest.mark.parametrize("large", [3e38, -3e38])
def test_what_a_scale_cannot_hold_is_too_large(name: str, large: float) -> None:
    rows = random_rows(3, 128)
    rows[1, 5] = large
    rows[1, 6] = -large  # their distance is no float
    with pytest.raises(ValueError, match="has values that are too large to be quantised"):
        ROW_FORMATS[name].quantise(rows)


def test_a_scale_that_rounds_beyond_the_largest_number_is_too_large() -> None:
    rows = np.full((2, 40), np.finfo(np.float32).max)
    with pytest.raises(ValueError, match="has values that are too large to be quantised"):
        Int8Rows().quantise(rows)


@pytest.mark.parametrize("depth", [1, 31, 33, 60])
def test_blocks_of_int8_take_rows_that_end_inside_one(depth: int) -> None:
    form, rows = Int8Blocks(), random_rows(5, depth)
    form.check_depth(depth)
    records = form.quantise(rows)
    assert records.shape == (5, record_bytes(form, depth))
    values = form.dequantise(records)
    assert values.shape[1] == form.depth(records.shape[1]) >= depth
    step = np.abs(rows).max(axis=1, keepdims=True) / 127
    assert (np.abs(values[:, :depth] - rows) <= 0.51 * step).all()
    assert (values[:, depth:] == 0).all()


def test_a_group_that_does_not_divide_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="rows of 100 elements, which groups of 32 do not divide"):
        Int4Rows(32).quantise(random_rows(2, 100))


def test_elements_that_share_a_byte() -> None:
    assert {name: elements_a_byte(name) for name in ("f32", "w8a8", "w4g32")} == {
        "f32": 1,
        "w8a8": 1,
        "w4g32": 2,
    }
    assert FORMATS["w8a32"].source == FORMATS["w8a16"].source == FORMATS["w8a8"].source
