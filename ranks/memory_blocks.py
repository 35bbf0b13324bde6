"""Aligned arrays for activations, weights and caches."""

import math

import numpy as np

#: Bytes: a cache line, and the widest vector that kernels load aligned.
ALIGNMENT = 64


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Zeros whose first byte is aligned to 64 bytes; large ones take memory only when touched."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
