"""bf16 weights: `[K / 2][panel][2]`, pairs of k side by side.

`vdpbf16ps` and the matrix unit (see `kernels.matrix_linear`) take them so, with activations rounded
to bf16. Elsewhere a pair is widened to f32 (a shift and a mask) and activations stay f32.
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
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

_NAN = 0x7FC0


@dataclass(frozen=True)
class Bf16:
    """The upper half of a float; with `exact`, activations stay f32 on every CPU."""

    exact: bool = False
    unit: int = 2
    source: str = "bf16"
    scaled: bool = False

    @property
    def name(self) -> str:
        """What manifests and symbols call it."""
        return "bf16_exact" if self.exact else "bf16"

    def unit_bytes(self, panel: int) -> int:
        """Bytes of one pair of k of a panel."""
        return 4 * panel

    def from_f32(self, rows: np.ndarray) -> np.ndarray:
        """Rounded to the nearest, ties to even; NaN stays NaN."""
        bits = rows.view(np.uint32)
        odd = (bits >> 16) & 1
        upper = ((bits + 0x7FFF + odd) >> 16).astype(np.uint16)
        # The sum carries a NaN's payload into its exponent, or beyond its sign.
        upper[np.isnan(rows)] = _NAN
        return upper

    def pack(self, rows: np.ndarray, panels: np.ndarray) -> None:
        """See `WeightFormat.pack`; rows are uint16."""
        pairs = -(-rows.shape[1] // 2)
        width = panels.shape[1] // (4 * pairs)
        interleave(rows, panels.view(np.uint16).reshape(len(panels), pairs, width, 2), 2)

    def reference(self, rows: np.ndarray) -> np.ndarray:
        """See `WeightFormat.reference`."""
        return (rows.astype(np.uint32) << 16).view(np.float32)

    def activation(self, target: Target) -> Activation:
        """bf16 where the CPU multiplies it."""
        return Plain("bf16") if self._has_dot(target) else Plain()

    def registers(self, target: Target) -> RegisterUse:
        """A vector of pairs for the CPU's dot product; widened, a pair is two vectors."""
        matrix = target.bf16_tiles and not self.exact
        return RegisterUse(panel=1 if self._has_dot(target) else 2, matrix=matrix)

    def _has_dot(self, target: Target) -> bool:
        return (target.bf16_dot or target.bf16_tiles) and not self.exact

    def emit_unit(
        self,
        t: Text,
        target: Target,
        rows: int,
        base: str,
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """One pair of k."""
        prefetch_ahead(t, target, self, rows, base)
        lanes = target.lanes
        words = f"vector<{lanes}xi32>"
        pairs = [
            t.load(t.gep(base, v * lanes, "i32"), words, lanes * 4)
            for v in range(target.panel_vectors)
        ]
        if self._has_dot(target):
            halves = f"vector<{2 * lanes}xbf16>"
            weights = [t.op(f"vector.bitcast {pair} : {words} to {halves}") for pair in pairs]
            stride = row_bytes(target, self.activation(target))
            return accumulate_pairs(t, target, rows, weights, inputs, accumulators, stride)
        low, high = [], []
        shift, mask = t.constant(16, words), t.constant(-65536, words)
        for pair in pairs:
            first = t.binary("arith.shli", pair, shift, words)
            second = t.binary("arith.andi", pair, mask, words)
            low.append(t.op(f"arith.bitcast {first} : {words} to vector<{lanes}xf32>"))
            high.append(t.op(f"arith.bitcast {second} : {words} to vector<{lanes}xf32>"))
        return accumulate(t, target, rows, [low, high], inputs, accumulators)

    def emit_values(
        self, t: Text, target: Target, base: str, lane: str, out: str, left: str
    ) -> None:
        """panel[k / 2][lane][k % 2]; a row of odd length ends inside its last pair."""
        pair = t.gep(base, lane, "i32")

        def one(k: int) -> None:
            half = t.load(t.gep(pair, k, "bf16"), "bf16", 2)
            t.store(t.op(f"arith.extf {half} : bf16 to f32"), t.gep(out, k), "f32")

        one(0)
        with t.when(t.compare("ugt", left, t.constant(1))):
            one(1)
