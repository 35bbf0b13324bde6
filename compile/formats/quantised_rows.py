"""Quantised rows: how a matrix in few bits is stored, one record of bytes for each output.

A record is what a checkpoint keeps of one output and what panels are packed from, so that a model
quantised ahead of time and one quantised while loading give the same bits.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


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

    def check_depth(self, depth: int) -> None:
        """Raises ValueError, saying why, if rows of `depth` numbers cannot be quantised."""

    def fields(self, depth: int) -> dict[str, tuple[np.dtype, int]]:
        """Type and count of every field of a record, in order; "" is the weights themselves."""

    def quantise(self, rows: np.ndarray) -> np.ndarray:
        """float32 [outputs, K] to records, uint8 [outputs, bytes]; ValueError saying why not."""

    def dequantise(self, records: np.ndarray, depth: int) -> np.ndarray:
        """The float32 [outputs, K] that records stand for."""


def record_bytes(form: RowFormat, depth: int) -> int:
    """Bytes of the record of a row of `depth` numbers."""
    return sum(dtype.itemsize * count for dtype, count in form.fields(depth).values())


def split_records(form: RowFormat, records: np.ndarray, depth: int) -> dict[str, np.ndarray]:
    """The fields of records, each [outputs, count] of its type."""
    found, at = {}, 0
    for name, (dtype, count) in form.fields(depth).items():
        size = dtype.itemsize * count
        found[name] = np.ascontiguousarray(records[:, at : at + size]).view(dtype)
        at += size
    return found


def join_records(form: RowFormat, fields: dict[str, np.ndarray], depth: int) -> np.ndarray:
    """Records from their fields; the inverse of `split_records`."""
    order = form.fields(depth)
    return np.hstack([np.ascontiguousarray(fields[name]).view(np.uint8) for name in order])


@dataclass(frozen=True)
class Int8Rows:
    """Symmetric int8 with one float32 scale an output: w = q · scale, q from -127 to 127."""

    name: str = "w8"
    bits: int = 8

    def check_depth(self, depth: int) -> None:
        """Rows of any length can."""

    def fields(self, depth: int) -> dict[str, tuple[np.dtype, int]]:
        """A scale and K bytes."""
        return {"scale": (np.dtype(np.float32), 1), "": (np.dtype(np.int8), depth)}

    def quantise(self, rows: np.ndarray) -> np.ndarray:
        """The largest magnitude of a row becomes 127; rounding is to the nearest, ties to even."""
        largest = np.abs(rows).max(axis=1, keepdims=True, initial=0.0)
        _check_finite(largest)
        scale = (largest / np.float32(127)).astype(np.float32)
        # A row of zeros, or of numbers too small to have a scale, becomes zeros.
        divisor = np.where(scale > 0, scale, np.float32(np.inf))
        q = np.clip(np.rint(rows / divisor), -127, 127).astype(np.int8)
        return join_records(self, {"scale": scale, "": q}, rows.shape[1])

    def dequantise(self, records: np.ndarray, depth: int) -> np.ndarray:
        """q · scale, rounded once."""
        fields = split_records(self, records, depth)
        return fields[""].astype(np.float32) * fields["scale"]


def _check_finite(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise ValueError("has values that are not finite and cannot be quantised: mend the weights")


ROW_FORMATS: dict[str, RowFormat] = {form.name: form for form in (Int8Rows(),)}
