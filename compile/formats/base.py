"""What a weight format must provide, and the arithmetic that formats share."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Depth of one cache block over K: a panel block (256 × 32 × 4 bytes) stays in L2, the activation
#: rows of one tile in L1. Units of every format divide it.
BLOCK_K = 256
#: Bytes between packed activation rows beyond a block: rows must not share cache sets.
ROW_PADDING = 64


@dataclass(frozen=True)
class TileShape:
    """One register tile: `rows` tokens by `panels` weight panels."""

    rows: int
    panels: int

    def places(self, target: Target) -> list[tuple[int, int, int]]:
        """(row, panel, vector) of every accumulator, in order."""
        return [
            (row, panel, v)
            for row in range(self.rows)
            for panel in range(self.panels)
            for v in range(target.panel_vectors)
        ]


class WeightFormat(Protocol):
    """One way to keep a matrix in memory and to multiply with it.

    A panel holds `Target.panel` outputs over all of K; the kernel walks K in units of `unit`.
    """

    @property
    def name(self) -> str:
        """What manifests and symbols call it."""

    @property
    def unit(self) -> int:
        """Steps of K that are packed, read and multiplied together."""

    def unit_bytes(self, panel: int) -> int:
        """Bytes of one unit of a packed panel."""

    def pack(self, rows: np.ndarray, panels: np.ndarray) -> None:
        """Packs `rows` [outputs, K] (of dtype `source`) into `panels`, uint8 [panels, bytes].

        `outputs` may end inside the last panel; the rest of that panel is left as it is (zero).
        """

    @property
    def source(self) -> str:
        """The dtype that `pack` takes: "f32", "bf16" (as uint16) or "f16"."""

    def activation_bytes(self, target: Target) -> int:
        """Bytes of one activation as tiles read it: 4 (f32) or 2 (bf16)."""

    def emit_unit(
        self,
        t: Text,
        target: Target,
        shape: TileShape,
        bases: list[str],
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """Writes one unit of every accumulation chain and returns the new accumulators.

        `bases` are the addresses of this unit in each panel, `inputs` that of the unit's first
        activation in row 0 (rows are `row_bytes` apart).
        """

    def emit_element(self, t: Text, target: Target, base: str, k: str, lane: str) -> str:
        """Loads element k of output `lane` of the panel at `base` as f32."""


def row_bytes(activation_bytes: int) -> int:
    """Bytes from one packed activation row to the next."""
    return BLOCK_K * activation_bytes + ROW_PADDING


def panel_bytes(form: WeightFormat, depth: int, panel: int) -> int:
    """Bytes of one packed panel of `depth` inputs, rounded up to whole units."""
    return -(-depth // form.unit) * form.unit_bytes(panel)


def accumulate(
    t: Text,
    target: Target,
    shape: TileShape,
    weights: list[dict[tuple[int, int], str]],
    inputs: str,
    accumulators: list[str],
) -> list[str]:
    """Fused multiply-adds of f32 weights, one dict (panel, vector) → value for each k of a unit."""
    vector = f"vector<{target.lanes}xf32>"
    stride = row_bytes(4) // 4
    for k, at_k in enumerate(weights):
        following = []
        activation = ""
        for accumulator, (row, panel, v) in zip(accumulators, shape.places(target), strict=True):
            if (panel, v) == (0, 0):
                scalar = t.load(t.gep(inputs, row * stride + k), "f32")
                activation = t.broadcast(scalar, vector)
            following.append(t.fma(activation, at_k[panel, v], accumulator, vector))
        accumulators = following
    return accumulators


def interleave(rows: np.ndarray, panels: np.ndarray, group: int) -> None:
    """Packs rows [outputs, K] as [panel][K / group][output][group], the layout of plain numbers.

    `panels` is [panels, K / group, panel, group] of the rows' dtype; K is padded with zeros.
    """
    count, depth = rows.shape
    width = panels.shape[2]
    if depth % group:
        rows = np.pad(rows, ((0, 0), (0, -depth % group)))
    whole = count // width
    steps = panels.shape[1]
    split = rows[: whole * width].reshape(whole, width, steps, group)
    panels[:whole] = split.transpose(0, 2, 1, 3)
    rest = rows[whole * width :]
    if len(rest):
        panels[whole, :, : len(rest)] = rest.reshape(len(rest), steps, group).transpose(1, 0, 2)
