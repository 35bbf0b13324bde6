"""f32 weights: `[K][panel]` floats."""

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
class F32:
    """Plain single precision."""

    name: str = "f32"
    unit: int = 1
    source: str = "f32"
    scaled: bool = False

    def unit_bytes(self, panel: int) -> int:
        """Bytes of one k of a panel."""
        return 4 * panel

    def from_f32(self, rows: np.ndarray) -> np.ndarray:
        """As they are."""
        return rows

    def pack(self, rows: np.ndarray, panels: np.ndarray) -> None:
        """See `WeightFormat.pack`."""
        width = panels.shape[1] // (4 * rows.shape[1])
        interleave(rows, panels.view(np.float32).reshape(len(panels), -1, width, 1), 1)

    def reference(self, rows: np.ndarray) -> np.ndarray:
        """See `WeightFormat.reference`."""
        return rows

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
        """One k: panel_vectors loads, one broadcast a row."""
        prefetch_ahead(t, target, self, rows, base)
        vector = f"vector<{target.lanes}xf32>"
        weights = [
            t.load(t.gep(base, v * target.lanes), vector, target.lanes * 4)
            for v in range(target.panel_vectors)
        ]
        return accumulate(t, target, rows, [weights], inputs, accumulators)

    def emit_values(
        self, t: Text, target: Target, base: str, lane: str, out: str, left: str
    ) -> None:
        """panel[k][lane]."""
        t.store(t.load(t.gep(base, lane), "f32"), out, "f32")
