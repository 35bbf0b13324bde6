"""The top-k kernel against a stable sort."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.compile.target import Target
from tests.compile.harness import host, run_top_k, runnable_targets


def expected(x: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-x, axis=-1, kind="stable")[..., :count]


@pytest.mark.parametrize("target", runnable_targets())
@pytest.mark.parametrize(("width", "count"), [(1, 1), (5, 5), (9, 4), (128, 8)])
def test_greatest_first(target: Target, width: int, count: int) -> None:
    x = np.random.default_rng(0).standard_normal((7, 3, width), np.float32)
    for team in (1, 2, 3):
        assert (run_top_k(target, x, count, team) == expected(x, count)).all()


@given(st.integers(1, 40), st.data())
def test_of_equal_ones_the_first(width: int, data: st.DataObject) -> None:
    values = st.lists(st.integers(-2, 2), min_size=width, max_size=width)
    x = np.array(data.draw(values), np.float32).reshape(1, 1, width)
    count = data.draw(st.integers(1, width))
    assert (run_top_k(host(), x, count) == expected(x, count)).all()


def test_infinities_and_numbers_of_every_size() -> None:
    x = np.float32([[[1e-40, -np.inf, 3e38, -1e-40, np.inf, 0.0, -3e38]]])
    assert (run_top_k(host(), x, 7) == expected(x, 7)).all()


@pytest.mark.parametrize("nans", [1, 3, 6])
def test_every_place_is_one_of_the_row_and_none_comes_twice_with_nans(nans: int) -> None:
    x = np.random.default_rng(1).standard_normal((4, 1, 6), np.float32)
    x[:, :, :nans] = np.nan
    x[1:3, :, 0] = -x[1:3, :, 0]
    places = run_top_k(host(), x, 6)
    assert (np.sort(places) == np.arange(6)).all()
