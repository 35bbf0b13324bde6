"""bf16 weights: `[K / 2][panel][2]`, pairs of k side by side as `vdpbf16ps` takes them.

With that instruction activations are rounded to bf16 and pairs are multiplied and added in one
step; elsewhere a pair is widened to f32 (a shift and a mask) and activations stay f32.
"""

from dataclasses import dataclass

import numpy as np

from buddy_pipeline.compile.formats.base import TileShape, accumulate, interleave, row_bytes
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"


@dataclass(frozen=True)
class Bf16:
    """The upper half of a float."""

    name: str = "bf16"
    unit: int = 2
    source: str = "bf16"

    def unit_bytes(self, panel: int) -> int:
        """Bytes of one pair of k of a panel."""
        return 4 * panel

    def pack(self, rows: np.ndarray, panels: np.ndarray) -> None:
        """See `WeightFormat.pack`; rows are uint16."""
        pairs = -(-rows.shape[1] // 2)
        width = panels.shape[1] // (4 * pairs)
        interleave(rows, panels.view(np.uint16).reshape(len(panels), pairs, width, 2), 2)

    def activation_bytes(self, target: Target) -> int:
        """bf16 where the CPU multiplies it."""
        return 2 if target.bf16_dot else 4

    def emit_unit(
        self,
        t: Text,
        target: Target,
        shape: TileShape,
        bases: list[str],
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """One pair of k."""
        lanes = target.lanes
        words = f"vector<{lanes}xi32>"
        pairs = {
            (p, v): t.load(t.gep(bases[p], v * lanes, "i32"), words, lanes * 4)
            for p in range(shape.panels)
            for v in range(target.panel_vectors)
        }
        if target.bf16_dot:
            return self._dot(t, target, shape, pairs, inputs, accumulators)
        low, high = {}, {}
        shift, mask = t.constant(16, words), t.constant(-65536, words)
        for place, pair in pairs.items():
            first = t.binary("arith.shli", pair, shift, words)
            second = t.binary("arith.andi", pair, mask, words)
            low[place] = t.op(f"arith.bitcast {first} : {words} to vector<{lanes}xf32>")
            high[place] = t.op(f"arith.bitcast {second} : {words} to vector<{lanes}xf32>")
        return accumulate(t, target, shape, [low, high], inputs, accumulators)

    def _dot(
        self,
        t: Text,
        target: Target,
        shape: TileShape,
        pairs: dict[tuple[int, int], str],
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """accumulator += both products of a pair, with the CPU's own order and rounding."""
        lanes = target.lanes
        vector, words, halves = (
            f"vector<{lanes}xf32>",
            f"vector<{lanes}xi32>",
            f"vector<{2 * lanes}xbf16>",
        )
        stride = row_bytes(2) // 4
        weights = {
            place: t.op(f"vector.bitcast {pair} : {words} to {halves}")
            for place, pair in pairs.items()
        }
        following = []
        activation = ""
        for accumulator, (row, panel, v) in zip(accumulators, shape.places(target), strict=True):
            if (panel, v) == (0, 0):
                pair = t.load(t.gep(inputs, row * stride, "i32"), "i32")
                spread = t.broadcast(pair, words, "i32")
                activation = t.op(f"vector.bitcast {spread} : {words} to {halves}")
            following.append(
                t.op(
                    f'llvm.call_intrinsic "{_DOT}"({accumulator}, {activation}, '
                    f"{weights[panel, v]}) : ({vector}, {halves}, {halves}) -> {vector}"
                )
            )
        return following

    def emit_element(self, t: Text, target: Target, base: str, k: str, lane: str) -> str:
        """panel[k / 2][lane][k % 2]."""
        two = t.constant(2)
        pair = t.binary("arith.divui", k, two)
        place = t.add(t.mul(pair, t.constant(target.panel)), lane)
        place = t.add(t.mul(place, two), t.op(f"arith.remui {k}, {two} : i64"))
        half = t.load(t.gep(base, place, "bf16"), "bf16", 2)
        return t.op(f"arith.extf {half} : bf16 to f32")
