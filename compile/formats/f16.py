"""f16 weights: `[K][panel]` halves, widened to f32 in registers; activations stay f32."""

from dataclasses import dataclass

import numpy as np

from buddy_pipeline.compile.formats.activation import Activation, Plain
from buddy_pipeline.compile.formats.base import (
    RegisterUse,
    accumulate,
    interleave,
    prefetch_ahead,
)
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


@dataclass(frozen=True)
class F16:
    """IEEE half precision."""

    name: str = "f16"
    unit: int = 1
    source: str = "f16"
    scaled: bool = False

    def unit_bytes(self, panel: int) -> int:
        """Bytes of one k of a panel."""
        return 2 * panel

    def from_f32(self, rows: np.ndarray) -> np.ndarray:
        """Rounded to the nearest, ties to even; finite numbers must stay finite."""
        with np.errstate(over="ignore"):
            halves = rows.astype(np.float16)
        if (np.isinf(halves) & np.isfinite(rows)).any():
            raise ValueError("has values beyond the range of f16: use --variant bf16")
        return halves

    def pack(self, rows: np.ndarray, panels: np.ndarray) -> None:
        """See `WeightFormat.pack`."""
        width = panels.shape[1] // (2 * rows.shape[1])
        interleave(rows, panels.view(np.float16).reshape(len(panels), -1, width, 1), 1)

    def reference(self, rows: np.ndarray) -> np.ndarray:
        """See `WeightFormat.reference`."""
        return rows.astype(np.float32)

    def activation(self, target: Target) -> Activation:
        """Activations stay f32."""
        return Plain()

    def registers(self, target: Target) -> RegisterUse:
        """A vector of weights each, and a broadcast activation."""
        return RegisterUse()

    def emit_unit(
        self,
        t: Text,
        target: Target,
        rows: int,
        base: str,
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """One k: halves are widened (`vcvtph2ps`, `fcvtl`), then as f32."""
        prefetch_ahead(t, target, self, rows, base)
        lanes = target.lanes
        weights = []
        for v in range(target.panel_vectors):
            half = t.load(t.gep(base, v * lanes, "f16"), f"vector<{lanes}xf16>", lanes * 2)
            weights.append(t.op(f"arith.extf {half} : vector<{lanes}xf16> to vector<{lanes}xf32>"))
        return accumulate(t, target, rows, [weights], inputs, accumulators)

    def emit_values(
        self, t: Text, target: Target, base: str, lane: str, out: str, left: str
    ) -> None:
        """panel[k][lane]."""
        half = t.load(t.gep(base, lane, "f16"), "f16", 2)
        t.store(t.op(f"arith.extf {half} : f16 to f32"), out, "f32")
