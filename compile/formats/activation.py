"""How a linear's activations are packed for its tiles: as they are, or as 8-bit blocks.

Rows are packed once for all panels, `BLOCK_K` elements at a time. An element's packed form depends
on nothing but its block of the row, so that no other token of a step can change a result.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Elements of an 8-bit block, which share a scale.
Q8_BLOCK = 32
#: 1.5 · 2²³: adding it rounds a small float to an integer and leaves that in its low bits.
_MAGIC = 12582912.0
#: A block whose largest value is below this is taken for zeros: 127 over it would overflow.
_TINY = 2.0**-120


class Activation(Protocol):
    """One way to pack a row."""

    @property
    def block(self) -> int:
        """Elements that are packed together; a divisor of `BLOCK_K`."""

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
class Q8:
    """Blocks of 32 int8 and their scale max|x| / 127, as llama.cpp's Q8_0, and sums of the block.

    A packed block is the 32 bytes, the scale (f32), and a word for each `run` elements: what the
    integer chains of the tiles start from, -`bias` · sum (i32), or with `scaled` the sum times the
    scale (f32), for weights with a minimum; no such word where neither is wanted.

    A block that holds a NaN or an infinity has a scale that is not finite, so its results are NaN.
    """

    bias: int = 0
    scaled: bool = False
    run: int = Q8_BLOCK
    block: int = Q8_BLOCK

    @property
    def scale_at(self) -> int:
        """Offset of a block's scale in bytes."""
        return Q8_BLOCK

    def sum_at(self, run: int) -> int:
        """Offset of the word about the sum of a run in bytes."""
        return Q8_BLOCK + 4 + 4 * run

    @property
    def block_bytes(self) -> int:
        """Bytes of one packed block."""
        sums = Q8_BLOCK // self.run if self.bias or self.scaled else 0
        return Q8_BLOCK + 4 + 4 * sums

    def emit_row(self, t: Text, target: Target, source: str, to: str, depth: str, end: str) -> None:
        """See `Activation.emit_row`; `depth` is a multiple of the block, as rows of a file are."""
        with t.loop(t.constant(0), depth, t.constant(self.block)) as k:
            number = t.binary("arith.divui", k.index, t.constant(self.block))
            place = t.gep(to, t.mul(number, t.constant(self.block_bytes)), "i8")
            self._emit_block(t, target, t.gep(source, k.index), place)

    def _emit_block(self, t: Text, target: Target, source: str, to: str) -> None:
        lanes = target.lanes
        f, i = f"vector<{lanes}xf32>", f"vector<{lanes}xi32>"
        count = Q8_BLOCK // lanes
        values = [t.load(t.gep(source, j * lanes), f) for j in range(count)]
        scale, inverse = self._scale(t, values, lanes)
        factor, magic = t.broadcast(inverse, f), t.constant(_MAGIC, f)
        rounded = []
        for j, value in enumerate(values):
            shifted = t.fma(value, factor, magic, f)
            rounded.append(t.op(f"arith.bitcast {shifted} : {f} to {i}"))
            narrow = t.op(f"arith.trunci {rounded[-1]} : {i} to vector<{lanes}xi8>")
            t.store(narrow, t.gep(to, j * lanes, "i8"), f"vector<{lanes}xi8>")
        t.store(scale, t.gep(to, self.scale_at, "i8"), "f32")
        if not self.bias and not self.scaled:
            return
        each = self.run // lanes
        for run in range(Q8_BLOCK // self.run):
            total = self._sum(t, rounded[run * each : (run + 1) * each], i)
            place = t.gep(to, self.sum_at(run), "i8")
            if self.scaled:
                whole = t.op(f"arith.sitofp {total} : i32 to f32")
                t.store(t.binary("arith.mulf", whole, scale, "f32"), place, "f32")
            else:
                start = t.binary("arith.muli", total, t.constant(-self.bias, "i32"), "i32")
                t.store(start, place, "i32")

    def _scale(self, t: Text, values: list[str], lanes: int) -> tuple[str, str]:
        """max|x| / 127 and its inverse, which is 0 for a block of zeros.

        Absolute values are compared as integers, in whose order a NaN is above all numbers.
        """
        i = f"vector<{lanes}xi32>"
        mask = t.constant(0x7FFFFFFF, i)
        sizes = [
            t.binary("arith.andi", t.op(f"arith.bitcast {v} : vector<{lanes}xf32> to {i}"), mask, i)
            for v in values
        ]
        while len(sizes) > 1:
            pairs = zip(sizes[::2], sizes[1::2], strict=True)
            sizes = [t.binary("arith.maxsi", a, b, i) for a, b in pairs]
        bits = t.op(f"vector.reduction <maxsi>, {sizes[0]} : {i} into i32")
        largest = t.op(f"arith.bitcast {bits} : i32 to f32")
        full = t.constant(127.0, "f32")
        scale = t.binary("arith.divf", largest, full, "f32")
        inverse = t.binary("arith.divf", full, largest, "f32")
        tiny = t.op(f"arith.cmpf olt, {largest}, {t.constant(_TINY, 'f32')} : f32")
        return scale, t.select(tiny, t.constant(0.0, "f32"), inverse, "f32")

    def _sum(self, t: Text, rounded: list[str], i: str) -> str:
        """The sum of integers that still carry the bits of `_MAGIC`."""
        total = rounded[0]
        for more in rounded[1:]:
            total = t.binary("arith.addi", total, more, i)
        whole = t.op(f"vector.reduction <add>, {total} : {i} into i32")
        extra = self.run * int(np.float32(_MAGIC).view(np.int32))
        # Modulo 2³², as the addition was.
        extra = (extra + (1 << 31)) % (1 << 32) - (1 << 31)
        return t.binary("arith.subi", whole, t.constant(extra, "i32"), "i32")

    def reference(self, x: np.ndarray) -> np.ndarray:
        """See `Activation.reference`; x is finite."""
        blocks = x.reshape(len(x), -1, Q8_BLOCK)
        largest = np.abs(blocks).max(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            inverse = np.where(largest < _TINY, np.float32(0), np.float32(127) / largest)
        # A product of two float32 is exact in float64, so this rounds once, as the kernel does.
        whole = np.rint(blocks.astype(np.float64) * inverse)
        scale = largest / np.float32(127)
        return (whole * scale).reshape(x.shape)
