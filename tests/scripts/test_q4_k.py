"""Q4_K blocks of ours, as the gguf package reads them."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from benchkit.q4_k import quantise_q4_k


@pytest.mark.parametrize("shift", [0.0, 0.5, -2.0])
def test_values_come_back_within_half_a_step(shift: float) -> None:
    values = np.random.default_rng(5).standard_normal((6, 512)).astype(np.float32) + shift
    blocks = quantise_q4_k(values)
    assert blocks.shape == (6, 2 * 144)
    back = quants.dequantize(blocks, GGMLQuantizationType.Q4_K)
    small = values.reshape(6, -1, 32)
    span = small.max(-1) - np.minimum(small.min(-1), 0)
    # Half a step of 15, and what rounding the scale and the minimum to 63 steps may add.
    greatest = np.abs(small).max(axis=(1, 2))[:, None] + span.max(-1, keepdims=True)
    error = np.abs(back.reshape(small.shape) - small).max(-1)
    assert np.all(error <= span / 30 + greatest / 50)


def test_codes_are_exact_where_the_scales_are() -> None:
    codes = np.tile(np.arange(16), 16).astype(np.float32)
    steps = np.repeat([63, 1, 32, 17, 63, 5, 48, 33], 32)
    values = (codes * steps / 64)[None]
    assert np.array_equal(
        quants.dequantize(quantise_q4_k(values), GGMLQuantizationType.Q4_K), values
    )


def test_zeros_stay_zeros() -> None:
    blocks = quantise_q4_k(np.zeros((2, 256), np.float32))
    assert not np.any(quants.dequantize(blocks, GGMLQuantizationType.Q4_K))
