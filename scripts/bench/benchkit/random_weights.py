"""Random weights, written to a safetensors file a piece at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import numpy as np

#: Elements made at a time: 16 MB of f32.
_PIECE = 1 << 22
#: Standard deviation of matrices: `initializer_range` of all published configs, with which
#: activations and logits stay far from f16's range.
_STD = 0.02
_ITEM_SIZE = {"f32": 4, "bf16": 2, "f16": 2}
#: Format names of https://huggingface.co/docs/safetensors.
_FORMAT = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
DTYPES = tuple(_ITEM_SIZE)


def file_size(tensors: Sequence[tuple[str, tuple[int, ...]]], dtype: str) -> int:
    """Bytes of tensors of these shapes in `dtype`."""
    return sum(prod(shape) for _, shape in tensors) * _ITEM_SIZE[dtype]


def write_random_weights(
    path: Path, tensors: Sequence[tuple[str, tuple[int, ...]]], dtype: str, seed: int
) -> None:
    """Writes tensors of these names and shapes in `dtype`, one of DTYPES.

    Matrices are normal with a deviation of 0.02, norm weights around 1, biases around 0. Equal
    arguments give equal bytes, whatever NumPy's threads; memory stays at a few pieces.
    """
    header, offset = {}, 0
    for name, shape in tensors:
        end = offset + prod(shape) * _ITEM_SIZE[dtype]
        header[name] = {"dtype": _FORMAT[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, (name, shape) in enumerate(tensors):
            # A stream of its own: a tensor's values do not depend on the others.
            random = np.random.default_rng([seed, number])
            for values in _pieces(random, name, shape):
                file.write(encode(values, dtype).data)


def _pieces(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """A tensor's values in order, float32."""
    centre = 1.0 if name.endswith("norm.weight") else 0.0
    size = prod(shape)
    for start in range(0, size, _PIECE):
        values = random.standard_normal(min(_PIECE, size - start), dtype=np.float32)
        yield values * np.float32(_STD) + np.float32(centre)


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as they lie in a file, rounded to the nearest, ties to even."""
    if dtype == "f32":
        return values
    if dtype == "f16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
