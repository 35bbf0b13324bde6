"""Numbers to Q4_K blocks, which the gguf package can only read.

Scales and minima are fitted to each block's extremes, without llama.cpp's search for better ones:
size and speed of a file are the same, its loss is a little greater.
"""

import numpy as np

VALUES = 256
"""In a block of the file: 8 small blocks of 32."""


def quantise_q4_k(values: np.ndarray) -> np.ndarray:
    """Blocks uint8 [..., N / 256 * 144] of float values [..., N]; N is whole blocks.

    A block: d and e (f16), scales s and minima m of 8 small blocks (6 bits each, 12 bytes), codes
    q (4 bits, 128 bytes); a value is d · s · q - e · m.
    """
    small = values.astype(np.float32).reshape(-1, 8, 32)
    least = np.minimum(small.min(axis=-1), 0)
    steps = (small.max(axis=-1) - least) / 15
    halves, scales = zip(_of_six_bits(steps), _of_six_bits(-least), strict=True)
    step, minimum = (
        half.astype(np.float32) * six for half, six in zip(halves, scales, strict=True)
    )
    reciprocal = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
    codes = np.rint((small + minimum[..., None]) * reciprocal[..., None])
    blocks = np.concatenate(
        [*(half.view(np.uint8) for half in halves), _packed_scales(*scales), _packed_codes(codes)],
        axis=-1,
    )
    return blocks.reshape(*values.shape[:-1], -1)


def _of_six_bits(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One f16 [blocks, 1] and codes uint8 [blocks, 8] up to 63 whose product is `numbers` ≥ 0."""
    unit = (numbers.max(axis=-1, keepdims=True) / 63).astype(np.float16)
    reciprocal = np.divide(1, unit, out=np.zeros(unit.shape, np.float32), where=unit > 0)
    return unit, np.clip(np.rint(numbers * reciprocal), 0, 63).astype(np.uint8)


def _packed_scales(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """12 bytes of 8 scales and 8 minima: the last four have their upper two bits in the first."""
    s, m = scales, minima
    first = s[:, :4] | (s[:, 4:] >> 4) << 6
    least = m[:, :4] | (m[:, 4:] >> 4) << 6
    return np.concatenate([first, least, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], axis=-1)


def _packed_codes(codes: np.ndarray) -> np.ndarray:
    """128 bytes of codes [blocks, 8, 32]: each small block shares its bytes with the next."""
    codes = np.clip(codes, 0, 15).astype(np.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(len(codes), -1)
