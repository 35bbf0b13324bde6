"""int8 weights and int8 activations: `[scale][K / 4][panel][4]`.

A token's activations are quantised as it comes (dynamically), each 32 of them with a scale of their
own: finer than one scale a token, and the same cost beside the products. Four products and their
sum are one instruction (see `integer_dot`); a block's integer sum times the activations' scale goes
into the chain of the output, whose end is multiplied by the weights' scale. On CPUs that cannot
multiply bytes activations stay f32.
"""

from dataclasses import dataclass

import numpy as np

from buddy_pipeline.compile.formats.activation import Activation, Plain
from buddy_pipeline.compile.formats.base import (
    RegisterUse,
    accumulate,
    interleave,
    places,
    prefetch_ahead,
)
from buddy_pipeline.compile.formats.block_column import Column
from buddy_pipeline.compile.formats.block_dot import BlockDot
from buddy_pipeline.compile.formats.block_layout import BLOCK, GROUP, GROUPS
from buddy_pipeline.compile.formats.integer_activation import IntegerBlocks
from buddy_pipeline.compile.formats.integer_dot import Codes, integer_dot
from buddy_pipeline.compile.formats.quantised_rows import Int8Rows
from buddy_pipeline.compile.formats.w8 import packed_scales
from buddy_pipeline.compile.kernels.vector_math import Lanes
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

_ROWS = Int8Rows()
_CODES = Codes(largest=127, signed=True)


@dataclass(frozen=True)
class W8A8:
    """int8 by int8."""

    name: str = "w8a8"
    unit: int = BLOCK
    scaled: bool = True
    source: str = _ROWS.name

    def unit_bytes(self, panel: int) -> int:
        """Bytes of 32 k of a panel."""
        return BLOCK * panel

    def from_f32(self, rows: np.ndarray) -> np.ndarray:
        """Quantised rows."""
        return _ROWS.quantise(rows)

    def pack(self, rows: np.ndarray, panels: np.ndarray) -> None:
        """See `WeightFormat.pack`; rows are records of `Int8Rows`."""
        q, steps = packed_scales(rows, panels, self.unit)
        width = panels.shape[1] // (4 + steps)
        place = panels[:, 4 * width :].reshape(len(panels), steps // GROUP, width, GROUP)
        interleave(q, place, GROUP)

    def reference(self, rows: np.ndarray) -> np.ndarray:
        """See `WeightFormat.reference`."""
        return _ROWS.dequantise(rows)

    def activation(self, target: Target) -> Activation:
        """int8 where the CPU multiplies it."""
        dot = integer_dot(target)
        return Plain() if dot is None else IntegerBlocks(bias=dot.offset(_CODES))

    def registers(self, target: Target) -> RegisterUse:
        """See `WeightFormat.registers`."""
        if integer_dot(target) is None:
            return RegisterUse(panel=2)  # the word and the weight
        return RegisterUse(temporaries=1, panel=1, shared=2)

    def emit_unit(
        self,
        t: Text,
        target: Target,
        rows: int,
        base: str,
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """A block of 32 k."""
        columns = [
            self._column(t, target, base, v * target.lanes) for v in range(target.panel_vectors)
        ]
        prefetch_ahead(t, target, self, rows, base)
        if isinstance(self.activation(target), IntegerBlocks):
            return self._dots(t, target, rows, columns, inputs, accumulators)
        for group in range(GROUPS):
            values = [_values(column, group) for column in columns]
            weights = [list(at_k) for at_k in zip(*values, strict=True)]
            at = t.gep(inputs, GROUP * group)
            accumulators = accumulate(t, target, rows, weights, at, accumulators)
        return accumulators

    def _dots(
        self,
        t: Text,
        target: Target,
        rows: int,
        columns: list[Column],
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """chain += activation scale · Σ q · activation."""
        activation, dot = self.activation(target), integer_dot(target)
        assert isinstance(activation, IntegerBlocks) and dot is not None
        block = BlockDot(t, target, activation, dot, rows, inputs)
        vector = f"vector<{target.lanes}xf32>"

        def words(group: int) -> list[str]:
            return [column.word(t.constant(group)) for column in columns]

        totals = block.totals(_CODES, range(GROUPS), words, len(columns))
        return [
            t.fma(totals[row, v], block.scale(row), chain, vector)
            for chain, (row, v) in zip(accumulators, places(target, rows), strict=True)
        ]

    def _column(self, t: Text, target: Target, base: str, first: int) -> Column:
        words = t.gep(base, first, "i32")
        return Column(t, Lanes(target.lanes), target.panel, words, scales="", halves="")

    def emit_values(
        self, t: Text, target: Target, base: str, lane: str, out: str, left: str
    ) -> None:
        """q[k / 4][lane][k % 4], unscaled."""
        four = t.constant(GROUP)
        count = t.binary("arith.minui", left, t.constant(BLOCK))
        with t.loop(t.constant(0), count, t.constant(1)) as k:
            group = t.binary("arith.divui", k.index, four)
            place = t.add(t.mul(group, t.constant(target.panel)), lane)
            byte = t.add(t.mul(place, four), t.op(f"arith.remui {k.index}, {four} : i64"))
            q = t.load(t.gep(base, byte, "i8"), "i8", 1)
            t.store(t.op(f"arith.sitofp {q} : i8 to f32"), t.gep(out, k.index), "f32")


def _values(column: Column, group: int) -> list[str]:
    """The four weights of a group as f32, unscaled."""
    t, f, i = column.t, column.types.of("f32"), column.types.of("i32")
    codes = column.word(t.constant(group))
    return [
        t.op(f"arith.sitofp {column.code(codes, k, signed=True)} : {i} to {f}")
        for k in range(GROUP)
    ]
