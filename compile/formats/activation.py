"""How a linear's activations are packed for its tiles: as f32 or bf16 here, as integers in
`integer_activation`.

Rows are packed once for all panels, a block over K at a time. An element's packed form depends
on nothing but its block of the row, so that no other token of a step can change a result.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


class Activation(Protocol):
    """One way to pack a row."""

    @property
    def block(self) -> int:
        """Elements that are packed together; a power of two."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one packed block, a multiple of an element's alignment."""

    def emit_row(self, t: Text, target: Target, source: str, to: str, depth: str, end: str) -> None:
        """Packs `depth` f32 elements at `source` to `to`, and zeros from there up to `end`."""

    def reference(self, x: np.ndarray) -> np.ndarray:
        """The numbers that tiles multiply in place of `x`, float32 [tokens, depth]."""


@dataclass(frozen=True)
class Plain:
    """Elements one after the other: "f32" as they are, "bf16" rounded to the nearest."""

    element: str = "f32"
    block: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self.element == "f32" else 2

    def emit_row(self, t: Text, target: Target, source: str, to: str, depth: str, end: str) -> None:
        """See `Activation.emit_row`."""
        lanes, element, size = target.lanes, self.element, self.block_bytes
        one, width = t.constant(1), t.constant(lanes)
        whole = t.binary("arith.subi", depth, t.op(f"arith.remui {depth}, {width} : i64"))

        def copy(k: str, types: vm.Lanes) -> None:
            value = t.load(t.gep(source, k), types.of("f32"))
            value = vm.narrowed(t, value, element, types, target)
            t.store(value, t.gep(to, k, element), types.of(element), size)

        with t.loop(t.constant(0), whole, width) as k:
            copy(k.index, vm.Lanes(lanes))
        with t.loop(whole, depth, one) as k:
            copy(k.index, vm.Lanes(0))
        with t.loop(depth, end, one) as k:
            t.store(t.constant(0.0, element), t.gep(to, k.index, element), element, size)

    def reference(self, x: np.ndarray) -> np.ndarray:
        """See `Activation.reference`."""
        if self.element == "f32":
            return x
        bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return (upper << 16).astype(np.uint32).view(np.float32)


@dataclass(frozen=True)
class SummedBf16:
    """Blocks of bf16, each followed by the sum of its rounded elements (f32), for weights with a
    zero; rows are whole blocks."""

    block: int

    @property
    def sum_at(self) -> int:
        """Offset of a block's sum in bytes."""
        return 2 * self.block

    @property
    def block_bytes(self) -> int:
        """Bytes of one packed block."""
        return 2 * self.block + 4

    def emit_row(self, t: Text, target: Target, source: str, to: str, depth: str, end: str) -> None:
        """See `Activation.emit_row`."""
        lanes, block = target.lanes, t.constant(self.block)
        types, f = vm.Lanes(lanes), f"vector<{lanes}xf32>"
        with t.loop(t.constant(0), depth, block) as k:
            number = t.binary("arith.divui", k.index, block)
            place = t.gep(to, t.mul(number, t.constant(self.block_bytes)), "i8")
            total = t.constant(0.0, f)
            for at in range(0, self.block, lanes):
                value = t.load(t.gep(t.gep(source, k.index), at), f)
                half = vm.narrowed(t, value, "bf16", types, target)
                t.store(half, t.gep(place, at, "bf16"), types.of("bf16"), 2)
                wide = t.op(f"arith.extf {half} : {types.of('bf16')} to {f}")
                total = t.binary("arith.addf", total, wide, f)
            total = vm.reduce_vector(t, total, lanes, "sum")
            whole = t.op(f"vector.extract {total}[0] : f32 from {f}")
            t.store(whole, t.gep(place, self.sum_at, "i8"), "f32")

    def reference(self, x: np.ndarray) -> np.ndarray:
        """See `Activation.reference`."""
        return Plain("bf16").reference(x)
