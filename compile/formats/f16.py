"""f16 weights: `[K][panel]` halves, widened to f32 in registers; activations stay f32."""

from dataclasses import dataclass

import numpy as np

from buddy_pipeline.compile.formats.base import TileShape, accumulate, interleave
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


@dataclass(frozen=True)
class F16:
    """IEEE half precision."""

    name: str = "f16"
    unit: int = 1
    source: str = "f16"

    def unit_bytes(self, panel: int) -> int:
        """Bytes of one k of a panel."""
        return 2 * panel

    def pack(self, rows: np.ndarray, panels: np.ndarray) -> None:
        """See `WeightFormat.pack`."""
        width = panels.shape[1] // (2 * rows.shape[1])
        interleave(rows, panels.view(np.float16).reshape(len(panels), -1, width, 1), 1)

    def activation_bytes(self, target: Target) -> int:
        """Activations stay f32."""
        return 4

    def emit_unit(
        self,
        t: Text,
        target: Target,
        shape: TileShape,
        bases: list[str],
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """One k: halves are widened (`vcvtph2ps`, `fcvtl`), then as f32."""
        lanes = target.lanes
        weights = {}
        for p in range(shape.panels):
            for v in range(target.panel_vectors):
                half = t.load(t.gep(bases[p], v * lanes, "f16"), f"vector<{lanes}xf16>", lanes * 2)
                weights[p, v] = t.op(
                    f"arith.extf {half} : vector<{lanes}xf16> to vector<{lanes}xf32>"
                )
        return accumulate(t, target, shape, [weights], inputs, accumulators)

    def emit_element(self, t: Text, target: Target, base: str, k: str, lane: str) -> str:
        """panel[k][lane]."""
        place = t.add(t.mul(k, t.constant(target.panel)), lane)
        half = t.load(t.gep(base, place, "f16"), "f16", 2)
        return t.op(f"arith.extf {half} : f16 to f32")
