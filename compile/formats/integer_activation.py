"""Activations as blocks of integers that share a scale, for instructions that multiply bytes."""

from dataclasses import dataclass

import numpy as np

from buddy_pipeline.compile.formats.block_layout import BLOCK
from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: The greatest part of an element, and what the upper part of two counts for. With an odd one no
#: element lies half way between two upper parts, so that both parts are within ±127.
_PART = 127
UPPER = 255


@dataclass(frozen=True)
class IntegerBlocks:
    """Blocks of 32 integers q and their scale d, and sums of the block: x ≈ d · q.

    With one part q is an int8 and d = max|x| / 127, as llama.cpp's Q8_0. With two it is
    255 · upper + lower, both int8, and d = max|x| / 32512: off by at most 1/65024 of the
    block's largest, for twice the products with weights that are read and unpacked once.

    A packed block is 32 bytes a part (upper ones first), the scale (f32), and a word for each `run`
    elements: what the integer chains of the tiles start from, -`bias` · Σ q (i32), or with `scaled`
    d · Σ q (f32), for weights with a minimum; no such word where neither is wanted.

    A block that holds a NaN or an infinity has a scale that is not finite, so its results are NaN.
    """

    parts: int = 1
    bias: int = 0
    scaled: bool = False
    run: int = BLOCK
    block: int = BLOCK

    @property
    def largest(self) -> int:
        """What the largest |x| of a block becomes."""
        return _PART if self.parts == 1 else (UPPER + 1) * _PART

    @property
    def scale_at(self) -> int:
        """Offset of a block's scale in bytes."""
        return self.parts * BLOCK

    def sum_at(self, run: int) -> int:
        """Offset of the word about the sum of a run in bytes."""
        return self.scale_at + 4 + 4 * run

    @property
    def block_bytes(self) -> int:
        """Bytes of one packed block."""
        return self.sum_at(BLOCK // self.run if self.bias or self.scaled else 0)

    def emit_row(self, t: Text, target: Target, source: str, to: str, depth: str, end: str) -> None:
        """See `Activation.emit_row`; a block that the row ends in is filled up with zeros."""
        lanes, count = target.lanes, BLOCK // target.lanes
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
            for part, bits in enumerate(self._parts(t, shifted, f, i)):
                narrow = t.op(f"arith.trunci {bits} : {i} to vector<{lanes}xi8>")
                place = t.gep(to, part * BLOCK + j * lanes, "i8")
                t.store(narrow, place, f"vector<{lanes}xi8>")
        t.store(scale, t.gep(to, self.scale_at, "i8"), "f32")
        if not self.bias and not self.scaled:
            return
        each = self.run // lanes
        for run in range(BLOCK // self.run):
            total = self._sum(t, rounded[run * each : (run + 1) * each], i)
            place = t.gep(to, self.sum_at(run), "i8")
            if self.scaled:
                whole = t.op(f"arith.sitofp {total} : i32 to f32")
                t.store(t.binary("arith.mulf", whole, scale, "f32"), place, "f32")
            else:
                start = t.binary("arith.muli", total, t.constant(-self.bias, "i32"), "i32")
                t.store(start, place, "i32")

    def _parts(self, t: Text, shifted: str, f: str, i: str) -> list[str]:
        """Words whose lowest bytes are the parts of q, from q + `vm.INTEGER_MAGIC`."""
        if self.parts == 1:
            return [t.op(f"arith.bitcast {shifted} : {f} to {i}")]
        magic = t.constant(vm.INTEGER_MAGIC, f)
        whole = t.binary("arith.subf", shifted, magic, f)
        upper = t.fma(whole, t.constant(1 / UPPER, f), magic, f)
        lower = t.fma(
            t.binary("arith.subf", upper, magic, f), t.constant(-float(UPPER), f), shifted, f
        )
        return [t.op(f"arith.bitcast {part} : {f} to {i}") for part in (upper, lower)]

    def _scale(self, t: Text, values: list[str], lanes: int) -> tuple[str, str]:
        """max|x| / largest and its inverse, which is 0 for a block of zeros.

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
        return vm.integer_scale(t, bits, self.largest)

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
        padded = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
        blocks = padded.reshape(len(x), -1, BLOCK)
        size, tiny = np.abs(blocks).max(axis=-1, keepdims=True), vm.tiny_block(self.largest)
        with np.errstate(divide="ignore"):
            inverse = np.where(size < tiny, np.float32(0), np.float32(self.largest) / size)
        # A product of two float32 is exact in float64, so this rounds once, as the kernel does.
        whole = np.rint(blocks.astype(np.float64) * inverse)
        scale = size / np.float32(self.largest)
        return (whole * scale).reshape(padded.shape)[:, : x.shape[1]]


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
