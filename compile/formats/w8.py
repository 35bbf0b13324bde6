"""Symmetric int8 weights with one scale an output: `[scale][K][panel]`.

The chain of an output runs over x · q, with q widened in registers; its end is multiplied by the
scale and only then added to the bias. With 16-bit activations two k at a time become bf16 pairs (an
int8 is exact in bf16) for `vdpbf16ps`; where it is missing or slow activations stay f32.
"""

from dataclasses import dataclass

import numpy as np

from buddy_pipeline.compile.formats.activation import Activation, Plain
from buddy_pipeline.compile.formats.base import (
    RegisterUse,
    accumulate,
    accumulate_pairs,
    interleave,
    prefetch_ahead,
    row_bytes,
)
from buddy_pipeline.compile.formats.quantised_rows import Int8Rows, split_records
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

_ROWS = Int8Rows()


@dataclass(frozen=True)
class W8:
    """int8 weights; "w8a32" multiplies them with f32 activations, "w8a16" with bf16 ones."""

    name: str
    unit: int = 2
    scaled: bool = True
    source: str = _ROWS.name

    def unit_bytes(self, panel: int) -> int:
        """Bytes of two k of a panel."""
        return 2 * panel

    def from_f32(self, rows: np.ndarray) -> np.ndarray:
        """Quantised rows."""
        return _ROWS.quantise(rows)

    def pack(self, rows: np.ndarray, panels: np.ndarray) -> None:
        """See `WeightFormat.pack`; rows are records of `Int8Rows`."""
        q, steps = packed_scales(rows, panels, self.unit)
        width = panels.shape[1] // (4 + steps)
        interleave(q, panels[:, 4 * width :].reshape(len(panels), steps, width, 1), 1)

    def reference(self, rows: np.ndarray) -> np.ndarray:
        """See `WeightFormat.reference`."""
        return _ROWS.dequantise(rows)

    def activation(self, target: Target) -> Activation:
        """bf16 where wanted and where vectors multiply it fast."""
        return Plain("bf16") if self._pairs(target) else Plain()

    def registers(self, target: Target) -> RegisterUse:
        """A vector of weights each, two while pairs are put together; a broadcast activation."""
        return RegisterUse(panel=2 if self._pairs(target) else 1)

    def _pairs(self, target: Target) -> bool:
        """Whether pairs of bf16 are multiplied: not by vectors of a CPU that has a matrix unit,
        where that takes twice as long as f32 (Granite Rapids, 8 tokens: 71 and 117 GFLOP/s)."""
        return self.name == "w8a16" and target.bf16_dot and not target.bf16_tiles

    def emit_unit(
        self,
        t: Text,
        target: Target,
        rows: int,
        base: str,
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """Two k: bytes are sign-extended and converted (`vpmovsxbd`, `sxtl`), then as f32 or as
        the upper halves of f32."""
        prefetch_ahead(t, target, self, rows, base)
        lanes = target.lanes
        bytes_, words = f"vector<{lanes}xi8>", f"vector<{lanes}xi32>"
        vector = f"vector<{lanes}xf32>"
        at: list[list[str]] = [[], []]
        for k in range(self.unit):
            for v in range(target.panel_vectors):
                q = t.load(t.gep(base, k * target.panel + v * lanes, "i8"), bytes_, lanes)
                wide = t.op(f"arith.extsi {q} : {bytes_} to {words}")
                at[k].append(t.op(f"arith.sitofp {wide} : {words} to {vector}"))
        if not self._pairs(target):
            return accumulate(t, target, rows, at, inputs, accumulators)
        pairs = [_bf16_pair(t, lanes, *both) for both in zip(*at, strict=True)]
        stride = row_bytes(target, self.activation(target))
        return accumulate_pairs(t, target, rows, pairs, inputs, accumulators, stride)

    def emit_values(
        self, t: Text, target: Target, base: str, lane: str, out: str, left: str
    ) -> None:
        """q[k][lane], unscaled; a row of odd length ends inside its last unit."""

        def one(k: int) -> None:
            q = t.load(t.gep(t.gep(base, k * target.panel, "i8"), lane, "i8"), "i8", 1)
            t.store(t.op(f"arith.sitofp {q} : i8 to f32"), t.gep(out, k), "f32")

        one(0)
        with t.when(t.compare("ugt", left, t.constant(1))):
            one(1)


def packed_scales(rows: np.ndarray, panels: np.ndarray, unit: int) -> tuple[np.ndarray, int]:
    """Writes the scales of records of `Int8Rows` to the heads of panels.

    Returns q as uint8 [outputs, K], K padded to whole units, and that K.
    """
    depth = rows.shape[1] - 4
    fields = split_records(_ROWS, rows)
    steps = -(-depth // unit) * unit
    width = panels.shape[1] // (4 + steps)
    scales = np.zeros((len(panels), width), np.float32)
    scales.reshape(-1)[: len(rows)] = fields["scale"][:, 0]
    panels[:, : 4 * width] = scales.view(np.uint8)
    return np.pad(fields[""], ((0, 0), (0, steps - depth))).view(np.uint8), steps


def _bf16_pair(t: Text, lanes: int, first: str, second: str) -> str:
    """The upper halves of two f32 vectors, element by element side by side."""
    vector, halves = f"vector<{lanes}xf32>", f"vector<{2 * lanes}xi16>"
    low, high = (t.op(f"vector.bitcast {v} : {vector} to {halves}") for v in (first, second))
    order = ", ".join(f"{2 * i + 1}, {2 * lanes + 2 * i + 1}" for i in range(lanes))
    pair = t.op(f"vector.shuffle {low}, {high} [{order}] : {halves}, {halves}")
    return t.op(f"vector.bitcast {pair} : {halves} to vector<{2 * lanes}xbf16>")
