"""How a linear's activations are packed for its tiles: as they are, or as 8-bit blocks.

Rows are packed once for all panels, a block over K at a time. An element's packed form depends
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
        """See `Activation.emit_row`; a block that the row ends in is filled up with zeros."""
        lanes, count = target.lanes, Q8_BLOCK // target.lanes
        f, block = f"vector<{lanes}xf32>", t.constant(self.block)
        rest = t.op(f"arith.remui {depth}, {block} : i64")
        whole = t.binary("arith.subi", depth, rest)

        def place(k: str) -> str:
            number = t.binary("arith.divui", k, block)
            return t.gep(to, t.mul(number, t.constant(self.block_bytes)), "i8")

        with t.loop(t.constant(0), whole, block) as k:
            first = t.gep(source, k.index)
            values = [t.load(t.gep(first, j * lanes), f) for j in range(count)]
            self._emit_block(t, target, values, place(k.index))
        with t.when(t.compare("ugt", rest, t.constant(0))):
            first = t.gep(source, whole)
            values = [
                _load_part(t, t.gep(first, j * lanes), j * lanes, rest, lanes) for j in range(count)
            ]
            self._emit_block(t, target, values, place(whole))

    def _emit_block(self, t: Text, target: Target, values: list[str], to: str) -> None:
        lanes = target.lanes
        f, i = f"vector<{lanes}xf32>", f"vector<{lanes}xi32>"
        scale, inverse = self._scale(t, values, lanes)
        factor, magic = t.broadcast(inverse, f), t.constant(vm.INTEGER_MAGIC, f)
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
        return vm.int8_scale(t, bits)

    def _sum(self, t: Text, rounded: list[str], i: str) -> str:
        """The sum of integers that still carry the bits of `vm.INTEGER_MAGIC`."""
        total = rounded[0]
        for more in rounded[1:]:
            total = t.binary("arith.addi", total, more, i)
        whole = t.op(f"vector.reduction <add>, {total} : {i} into i32")
        extra = self.run * int(np.float32(vm.INTEGER_MAGIC).view(np.int32))
        # Modulo 2³², as the addition was.
        extra = (extra + (1 << 31)) % (1 << 32) - (1 << 31)
        return t.binary("arith.subi", whole, t.constant(extra, "i32"), "i32")

    def reference(self, x: np.ndarray) -> np.ndarray:
        """See `Activation.reference`; x is finite."""
        padded = np.pad(x, ((0, 0), (0, -x.shape[1] % Q8_BLOCK)))
        blocks = padded.reshape(len(x), -1, Q8_BLOCK)
        largest = np.abs(blocks).max(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            inverse = np.where(largest < vm.INT8_TINY, np.float32(0), np.float32(127) / largest)
        # A product of two float32 is exact in float64, so this rounds once, as the kernel does.
        whole = np.rint(blocks.astype(np.float64) * inverse)
        scale = largest / np.float32(127)
        return (whole * scale).reshape(padded.shape)[:, : x.shape[1]]


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


def _load_part(t: Text, source: str, first: int, end: str, lanes: int) -> str:
    """Elements `first`, first + 1, … of a block, zeros from element `end` on."""
    f, words = f"vector<{lanes}xf32>", f"vector<{lanes}xi32>"
    numbers = ", ".join(str(first + lane) for lane in range(lanes))
    here = t.op(f"arith.constant dense<[{numbers}]> : {words}")
    limit = t.broadcast(t.op(f"arith.trunci {end} : i64 to i32"), words, "i32")
    inside = t.compare("slt", here, limit, words)
    zero = t.constant(0.0, f)
    return t.op(
        f"llvm.intr.masked.load {source}, {inside}, {zero} {{alignment = 4 : i32}} : "
        f"(!llvm.ptr, vector<{lanes}xi1>, {f}) -> {f}"
    )
