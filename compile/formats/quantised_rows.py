"""Quantised rows: how a matrix in few bits is stored, one record of bytes for each output.

A record is what a checkpoint keeps of one output and what panels are packed from, so that a model
quantised ahead of time and one quantised while loading give the same bits.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

_Q8_0_BLOCK, _Q8_0_BYTES = 32, 34
#: The greatest zero of int4, in steps, and its parts of a step.
_MOST_ZERO, _ZERO_PARTS = 128, np.float32(64)


class RowFormat(Protocol):
    """One way to store a row of K numbers in few bits.

    A record is the fields one after the other; a quantised directory keeps each field of all rows
    as a tensor of its own.
    """

    @property
    def name(self) -> str:
        """What manifests call it; the `source` of the weight formats that take it."""

    @property
    def bits(self) -> int:
        """Bits of one quantised number."""

    def depth(self, record_bytes: int) -> int:
        """K of a record of this size, in whole blocks."""

    def check_depth(self, depth: int) -> None:
        """Raises ValueError, saying why, if rows of `depth` numbers cannot be quantised."""

    def fields(self, depth: int) -> dict[str, tuple[np.dtype, int]]:
        """Type and count of every field of a record, in order; "" is the weights themselves."""

    def quantise(self, rows: np.ndarray) -> np.ndarray:
        """float32 [outputs, K] to records, uint8 [outputs, bytes]; ValueError saying why not."""

    def dequantise(self, records: np.ndarray) -> np.ndarray:
        """The float32 [outputs, K] that records stand for; K in whole blocks, zeros at the end."""


def record_bytes(form: RowFormat, depth: int) -> int:
    """Bytes of the record of a row of `depth` numbers."""
    return sum(dtype.itemsize * count for dtype, count in form.fields(depth).values())


def split_records(form: RowFormat, records: np.ndarray) -> dict[str, np.ndarray]:
    """The fields of records, each [outputs, count] of its type."""
    found, at = {}, 0
    for name, (dtype, count) in form.fields(form.depth(records.shape[1])).items():
        size = dtype.itemsize * count
        found[name] = np.ascontiguousarray(records[:, at : at + size]).view(dtype)
        at += size
    return found


def join_records(fields: list[np.ndarray]) -> np.ndarray:
    """Records from their fields in order, each [outputs, count]; `split_records` undone."""
    return np.hstack([np.ascontiguousarray(field).view(np.uint8) for field in fields])


@dataclass(frozen=True)
class Int8Rows:
    """Symmetric int8 with one float32 scale an output: w = q · scale, q from -127 to 127."""

    name: str = "w8"
    bits: int = 8

    def depth(self, record_bytes: int) -> int:
        """A byte each, beside the scale."""
        return record_bytes - 4

    def check_depth(self, depth: int) -> None:
        """Rows of any length can."""

    def fields(self, depth: int) -> dict[str, tuple[np.dtype, int]]:
        """A scale and K bytes."""
        return {"scale": (np.dtype(np.float32), 1), "": (np.dtype(np.int8), depth)}

    def quantise(self, rows: np.ndarray) -> np.ndarray:
        """The largest magnitude of a row becomes 127; rounding is to the nearest, ties to even."""
        _check_finite(rows)
        largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
        scale = largest / np.float32(127)
        with np.errstate(over="ignore"):
            _check_scale(scale * np.float32(127))  # rounded, it may lie beyond the largest float
        # A row of zeros, or of numbers too small to have a scale, becomes zeros.
        divisor = np.where(scale > 0, scale, np.float32(np.inf))
        q = np.clip(np.rint(rows / divisor), -127, 127).astype(np.int8)
        return join_records([scale, q])

    def dequantise(self, records: np.ndarray) -> np.ndarray:
        """q · scale, rounded once."""
        fields = split_records(self, records)
        return fields[""].astype(np.float32) * fields["scale"]


@dataclass(frozen=True)
class Int8Blocks:
    """GGUF's Q8_0: blocks of 32 int8 with an f16 scale each, w = q · scale.

    Of a row that ends inside a block the rest of that is zeros.
    """

    name: str = "q8_0"
    bits: int = 8

    def depth(self, record_bytes: int) -> int:
        """34 bytes a block."""
        return record_bytes // _Q8_0_BYTES * _Q8_0_BLOCK

    def check_depth(self, depth: int) -> None:
        """Rows of any length can."""

    def fields(self, depth: int) -> dict[str, tuple[np.dtype, int]]:
        """Blocks as in a GGUF file."""
        return {"": (np.dtype(np.uint8), -(-depth // _Q8_0_BLOCK) * _Q8_0_BYTES)}

    def quantise(self, rows: np.ndarray) -> np.ndarray:
        """As the gguf package does: the largest magnitude of a block becomes 127.

        A block too small to have a scale is quantised as zeros, which it stands for anyway: the
        package's codes of one of subnormal numbers are undefined.
        """
        _check_finite(rows)
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % _Q8_0_BLOCK)))
        blocks = padded.reshape(len(rows), -1, _Q8_0_BLOCK)
        with np.errstate(over="ignore"):
            scale = (np.abs(blocks).max(axis=2, keepdims=True) / 127).astype(np.float16)
        _check_scale(scale)
        np.copyto(blocks, 0, where=scale == 0)
        from gguf import GGMLQuantizationType, quants  # late: most runs do without

        return quants.quantize(padded, GGMLQuantizationType.Q8_0)

    def dequantise(self, records: np.ndarray) -> np.ndarray:
        """q · scale, exact."""
        from gguf import GGMLQuantizationType, quants

        return quants.dequantize(records, GGMLQuantizationType.Q8_0)


@dataclass(frozen=True)
class Int4Rows:
    """int4 by groups with a scale and a zero each: w = (q - zero) · scale, q from 0 to 15.

    Both are f16, and a zero is a whole number of 64ths, so that q - zero is exact in float32 and a
    weight is rounded once. A zero that is whole would shift a group by up to half a step: on
    SmolLM2-135M that costs 22 % of perplexity. Two neighbours share a byte, the first in its lower
    half.
    """

    group: int
    bits: int = 4

    @property
    def name(self) -> str:
        """See `RowFormat.name`."""
        return f"w4g{self.group}"

    def depth(self, record_bytes: int) -> int:
        """Half a byte each, and four bytes a group."""
        return record_bytes // (self.group // 2 + 4) * self.group

    def check_depth(self, depth: int) -> None:
        """Rows must be whole groups."""
        if depth % self.group:
            raise ValueError(
                f"has rows of {depth} elements, which groups of {self.group} do not divide"
            )

    def fields(self, depth: int) -> dict[str, tuple[np.dtype, int]]:
        """Scales, zeros, pairs."""
        groups = depth // self.group
        return {
            "scale": (np.dtype(np.float16), groups),
            "zero": (np.dtype(np.float16), groups),
            "": (np.dtype(np.uint8), depth // 2),
        }

    def quantise(self, rows: np.ndarray) -> np.ndarray:
        """The range of a group is stretched over 0 to 15.

        A group far from zero for its range has a greater scale: its zero must not exceed 128 steps,
        which f16 keeps to a 16th.
        """
        self.check_depth(rows.shape[1])
        _check_finite(rows)
        groups = rows.reshape(len(rows), -1, self.group)
        low, high = groups.min(axis=2), groups.max(axis=2)
        farthest = np.maximum(np.abs(low), np.abs(high))
        with np.errstate(over="ignore"):
            steps = np.maximum((high - low) / np.float32(15), farthest / np.float32(_MOST_ZERO))
            scale = steps.astype(np.float16)
        _check_scale(scale)
        divisor = np.where(scale > 0, scale.astype(np.float32), np.float32(np.inf))
        zero = (np.rint(-low / divisor * _ZERO_PARTS) / _ZERO_PARTS).astype(np.float16)
        shifted = groups / divisor[..., None] + zero.astype(np.float32)[..., None]
        q = np.clip(np.rint(shifted), 0, 15).astype(np.uint8)
        pairs = q.reshape(len(rows), -1, 2)
        return join_records([scale, zero, pairs[..., 0] | pairs[..., 1] << 4])

    def codes(self, records: np.ndarray) -> np.ndarray:
        """q, uint8 [outputs, K]."""
        pairs = split_records(self, records)[""]
        return np.stack([pairs & 15, pairs >> 4], axis=2).reshape(len(records), -1)

    def dequantise(self, records: np.ndarray) -> np.ndarray:
        """(q - zero) · scale, rounded once."""
        fields = split_records(self, records)
        q = self.codes(records).reshape(len(records), -1, self.group).astype(np.float32)
        zero, scale = (fields[name].astype(np.float32)[..., None] for name in ("zero", "scale"))
        values = (q - zero) * scale
        return values.reshape(len(records), -1)


def _check_finite(rows: np.ndarray) -> None:
    bad = rows[~np.isfinite(rows)]
    if len(bad):
        what = "NaN" if np.isnan(bad).any() else "an infinity"
        raise ValueError(f"holds {what}, which no number of few bits is: mend the weights")


def _check_scale(scale: np.ndarray) -> None:
    if not np.isfinite(scale).all():
        raise ValueError("has values that are too large to be quantised: mend the weights")


ROW_FORMATS: dict[str, RowFormat] = {
    form.name: form for form in (Int8Rows(), Int8Blocks(), Int4Rows(32), Int4Rows(128))
}
