"""Random blocks of GGUF's formats: as a file may hold them, and with every bit pattern."""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

#: Where a block's 16-bit scales are.
_HALVES = {
    "q4_0": [0],
    "q4_1": [0, 2],
    "q5_0": [0],
    "q5_1": [0, 2],
    "q8_0": [0],
    "q4_k": [0, 2],
    "q5_k": [0, 2],
    "q6_k": [208],
}


def kind_of(source: str) -> GGMLQuantizationType:
    """GGUF's type of this name."""
    return GGMLQuantizationType[source.upper()]


def random_blocks(
    source: str, outputs: int, depth: int, seed: int = 0, largest: float = 0.01
) -> np.ndarray:
    """uint8 [outputs, bytes]: random codes, 16-bit scales of both signs up to `largest`."""
    random = np.random.default_rng([seed, outputs, depth])
    elements, size = GGML_QUANT_SIZES[kind_of(source)]
    assert depth % elements == 0
    blocks = random.integers(0, 256, (outputs, depth // elements, size), np.uint8)
    for start in _HALVES[source]:
        scales = random.uniform(-largest, largest, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def extreme_blocks(source: str, depth: int) -> np.ndarray:
    """uint8 [outputs, bytes]: all bits clear, all set, one set, and random ones: scales that are
    subnormal, infinite or NaN, the largest codes beside the smallest."""
    elements, size = GGML_QUANT_SIZES[kind_of(source)]
    length = depth // elements * size
    random = np.random.default_rng(7)
    rows = [np.zeros(length, np.uint8), np.full(length, 255, np.uint8)]
    for scale in (65504.0, -65504.0, 2.0**-24, np.inf, np.nan):
        row = random.choice(np.array([0, 127, 128, 255], np.uint8), (depth // elements, size))
        for start in _HALVES[source]:
            row[:, start : start + 2] = np.array([scale], np.float16).view(np.uint8)
        rows.append(row.reshape(-1))
    rows += list(random.integers(0, 256, (60, length), np.uint8))
    return np.stack(rows)


def dequantized(rows: np.ndarray, source: str) -> np.ndarray:
    """What the `gguf` package makes of rows, float32 [outputs, depth]."""
    with np.errstate(all="ignore"):
        values: np.ndarray = quants.dequantize(rows, kind_of(source)).reshape(len(rows), -1)
    return values
