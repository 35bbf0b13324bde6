"""Aligned memory for activations, weights and caches."""

import math
import mmap

import numpy as np

#: Bytes: a cache line, and the widest vector that kernels load aligned.
ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Zeros whose first byte is aligned to 64 bytes; large ones take memory only when touched."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    return _aligned(memory, ALIGNMENT, size).view(dtype).reshape(shape)


def arena(size: int) -> np.ndarray:
    """uint8 [size] of zeros on huge pages where the system has them.

    For what is streamed from one end to the other, step after step: with small pages address
    translation costs a tenth of the read bandwidth.
    """
    pages = mmap.mmap(-1, size + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(np.frombuffer(pages, np.uint8), _HUGE_PAGE, size)


def _aligned(memory: np.ndarray, alignment: int, size: int) -> np.ndarray:
    start = -memory.ctypes.data % alignment
    return memory[start : start + size]
