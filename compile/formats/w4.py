"""int4 weights by groups with a scale and a zero each, for 16-bit activations.

A unit is one group of k: `[group / 8][panel]` words of eight codes, then `[panel]` scales and
`[panel]` zeros, both f16. In a word, half a word holds four even k or four odd ones, so that a
shift and a mask leave one code in each half: put into bits 3 to 6 of the bf16 number 16 it makes
16 + code, and a pair is ready for `vdpbf16ps` in two operations. What these sums have too much,
16 + zero times the sum of the group's activations, is taken off once a group: the activations bring
their sums.

Elsewhere codes are converted one by one, (code - zero) · scale, and multiplied with f32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from buddy_pipeline.compile.formats.activation import Activation, Plain, SummedBf16
from buddy_pipeline.compile.formats.base import (
    RegisterUse,
    accumulate,
    accumulate_pairs,
    interleave,
    places,
    prefetch_ahead,
    row_bytes,
)
from buddy_pipeline.compile.formats.quantised_rows import Int4Rows, split_records
from buddy_pipeline.compile.kernels.vector_math import Lanes
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Codes in a word, and pairs of k.
_CODES = 8
_PAIRS = _CODES // 2
#: The bits of a code in both bf16 of a pair, and two bf16 of this value: 16.
_MASK, _SIXTEENS, _OFFSET = 0x00780078, 0x41804180, 16
#: Words that are written out one after the other; longer groups loop.
_WORDS_AT_ONCE = 4


@dataclass(frozen=True)
class W4:
    """Groups of `unit` int4."""

    unit: int
    scaled: bool = False

    @property
    def name(self) -> str:
        """See `WeightFormat.name`."""
        return self._rows.name

    @property
    def source(self) -> str:
        """See `WeightFormat.source`."""
        return self._rows.name

    @property
    def _rows(self) -> Int4Rows:
        return Int4Rows(self.unit)

    def unit_bytes(self, panel: int) -> int:
        """Half a byte each, and two f16 an output."""
        return (self.unit // 2 + 4) * panel

    def from_f32(self, rows: np.ndarray) -> np.ndarray:
        """Quantised rows."""
        return self._rows.quantise(rows)

    def pack(self, rows: np.ndarray, panels: np.ndarray) -> None:
        """See `WeightFormat.pack`; rows are records of `Int4Rows`."""
        fields = split_records(self._rows, rows)
        units = fields["scale"].shape[1]
        width = panels.shape[1] // units // self.unit_bytes(1)
        packed = panels.reshape(len(panels), units, -1)
        words = _words(self._rows.codes(rows)).reshape(len(rows), units, -1)
        count = words.shape[2]
        halves = np.stack([fields["scale"], fields["zero"]], axis=2)
        for values, place in (
            (words, packed[..., : 4 * count * width].view(np.uint32)),
            (halves, packed[..., 4 * count * width :].view(np.float16)),
        ):
            each = values.shape[2]
            # One run of `each` numbers an output and unit, an output's numbers a panel apart.
            spread = place.reshape(len(panels), units, each, width)
            for number in range(each):
                interleave(values[..., number], spread[:, :, number, :, None], 1)

    def reference(self, rows: np.ndarray) -> np.ndarray:
        """See `WeightFormat.reference`."""
        return self._rows.dequantise(rows)

    def activation(self, target: Target) -> Activation:
        """bf16 where the CPU multiplies it."""
        return SummedBf16(self.unit) if target.bf16_dot else Plain()

    def registers(self, target: Target) -> RegisterUse:
        """A group's own sums beside the chains; a pair or a weight, its word; an activation and
        masks."""
        if target.bf16_dot:
            return RegisterUse(temporaries=1, panel=2, shared=3)
        return RegisterUse(panel=4, shared=2)

    def emit_unit(
        self,
        t: Text,
        target: Target,
        rows: int,
        base: str,
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """One group."""
        prefetch_ahead(t, target, self, rows, base)
        if target.bf16_dot:
            return self._pairs(t, target, rows, base, inputs, accumulators)
        return self._products(t, target, rows, base, inputs, accumulators)

    def _pairs(
        self,
        t: Text,
        target: Target,
        rows: int,
        base: str,
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """chain += scale · Σ (16 + code) · x - scale · (16 + zero) · Σ x."""
        activation = self.activation(target)
        assert isinstance(activation, SummedBf16)
        vector, stride = f"vector<{target.lanes}xf32>", row_bytes(target, activation)
        words = f"vector<{target.lanes}xi32>"
        mask, sixteens = t.constant(_MASK, words), t.constant(_SIXTEENS, words)

        def chunk(first: str, sums: list[str]) -> list[str]:
            """Some words of every output, from word `first` on."""
            at = t.gep(inputs, t.mul(first, t.constant(2 * _CODES)), "i8")
            for number in range(_WORDS_AT_ONCE):
                codes = self._words_at(t, target, base, t.add(first, t.constant(number)))
                for pair in range(_PAIRS):
                    weights = [_bf16_pair(t, target, word, pair, mask, sixteens) for word in codes]
                    here = t.gep(at, 2 * _CODES * number + 4 * pair, "i8")
                    sums = accumulate_pairs(t, target, rows, weights, here, sums, stride)
            return sums

        sums = self._each_chunk(t, chunk, [t.constant(0.0, vector)] * len(accumulators), vector)
        scales, offsets = [], []
        for v in range(target.panel_vectors):
            scale, zero = self._scale_and_zero(t, target, base, v)
            shifted = t.binary("arith.addf", zero, t.constant(_OFFSET, vector), vector)
            scales.append(scale)
            offsets.append(t.binary("arith.mulf", shifted, scale, vector))
        following = []
        total = ""
        for sum_, chain, (row, v) in zip(sums, accumulators, places(target, rows), strict=True):
            if v == 0:
                place = t.gep(inputs, row * stride + activation.sum_at, "i8")
                total = t.broadcast(t.load(place, "f32"), vector)
                total = t.op(f"arith.negf {total} : {vector}")
            rest = t.binary("arith.mulf", total, offsets[v], vector)
            group = t.fma(sum_, scales[v], rest, vector)
            following.append(t.binary("arith.addf", chain, group, vector))
        return following

    def _products(
        self,
        t: Text,
        target: Target,
        rows: int,
        base: str,
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """chain += (code · scale - zero · scale) · x, k by k; both terms are exact, so a weight is
        rounded once."""
        vector, words = f"vector<{target.lanes}xf32>", f"vector<{target.lanes}xi32>"
        scales, minima = [], []
        for v in range(target.panel_vectors):
            scale, zero = self._scale_and_zero(t, target, base, v)
            least = t.binary("arith.mulf", zero, scale, vector)
            scales.append(scale)
            minima.append(t.op(f"arith.negf {least} : {vector}"))

        def chunk(first: str, chains: list[str]) -> list[str]:
            at = t.gep(inputs, t.mul(first, t.constant(_CODES)))
            for number in range(_WORDS_AT_ONCE):
                codes = self._words_at(t, target, base, t.add(first, t.constant(number)))
                for k in range(_CODES):
                    weights = []
                    for word, scale, minimum in zip(codes, scales, minima, strict=True):
                        code = t.binary("arith.shrui", word, t.constant(_shift(k), words), words)
                        code = t.binary("arith.andi", code, t.constant(15, words), words)
                        code = t.op(f"arith.sitofp {code} : {words} to {vector}")
                        weights.append(t.fma(code, scale, minimum, vector))
                    here = t.gep(at, _CODES * number + k)
                    chains = accumulate(t, target, rows, [weights], here, chains)
            return chains

        return self._each_chunk(t, chunk, accumulators, vector)

    def _each_chunk(
        self,
        t: Text,
        chunk: Callable[[str, list[str]], list[str]],
        carried: list[str],
        vector: str,
    ) -> list[str]:
        """Runs `chunk(first word, values)` over the words of a group."""
        words, step = self.unit // _CODES, _WORDS_AT_ONCE
        if words == step:
            return chunk(t.constant(0), carried)
        begun = [(value, vector) for value in carried]
        with t.loop(t.constant(0), t.constant(words), t.constant(step), begun) as loop:
            loop.next = chunk(loop.index, loop.carried)
        return loop.results

    def _words_at(self, t: Text, target: Target, base: str, number: str) -> list[str]:
        """Word `number` of every output, by vectors."""
        row = t.gep(base, t.mul(number, t.constant(4 * target.panel)), "i8")
        lanes = target.lanes
        return [
            t.load(t.gep(row, v * lanes, "i32"), f"vector<{lanes}xi32>", lanes * 4)
            for v in range(target.panel_vectors)
        ]

    def _scale_and_zero(self, t: Text, target: Target, base: str, v: int) -> tuple[str, str]:
        """Of a vector of outputs, as f32."""
        types = Lanes(target.lanes)
        first = t.gep(base, self.unit // 2 * target.panel, "i8")
        scale, zero = (
            t.load(t.gep(first, i * target.panel + v * target.lanes, "f16"), types.of("f16"), 2)
            for i in range(2)
        )
        return _widened(t, scale, types), _widened(t, zero, types)

    def emit_values(
        self, t: Text, target: Target, base: str, lane: str, out: str, left: str
    ) -> None:
        """(code - zero) · scale; rows are whole groups."""
        types, panel = Lanes(0), target.panel
        first = t.gep(t.gep(base, self.unit // 2 * panel, "i8"), lane, "f16")
        scale = _widened(t, t.load(first, "f16", 2), types)
        zero = _widened(t, t.load(t.gep(first, panel, "f16"), "f16", 2), types)
        column = t.gep(base, lane, "i32")
        with t.loop(t.constant(0), t.constant(self.unit // _CODES), t.constant(1)) as number:
            word = t.load(t.gep(column, t.mul(number.index, t.constant(panel)), "i32"), "i32")
            to = t.gep(out, t.mul(number.index, t.constant(_CODES)))
            for k in range(_CODES):
                code = t.binary("arith.shrui", word, t.constant(_shift(k), "i32"), "i32")
                code = t.binary("arith.andi", code, t.constant(15, "i32"), "i32")
                number_of = t.op(f"arith.sitofp {code} : i32 to f32")
                weight = t.binary("arith.subf", number_of, zero, "f32")
                t.store(t.binary("arith.mulf", weight, scale, "f32"), t.gep(to, k), "f32")


def _shift(k: int) -> int:
    """Where code k of a word begins: even k in the lower half, odd ones in the upper."""
    return 16 * (k % 2) + 4 * (k // 2)


def _words(codes: np.ndarray) -> np.ndarray:
    """uint32 [outputs, K / 8] of codes, uint8 [outputs, K]."""
    eights = codes.reshape(len(codes), -1, _CODES).astype(np.uint32)
    words = np.zeros(eights.shape[:2], np.uint32)
    for k in range(_CODES):
        words |= eights[..., k] << np.uint32(_shift(k))
    return words


def _bf16_pair(t: Text, target: Target, word: str, pair: int, mask: str, sixteens: str) -> str:
    """Codes 2 · pair and 2 · pair + 1 of every word as bf16: 16 + code."""
    words = f"vector<{target.lanes}xi32>"
    shift = 4 * pair - 3
    name = "arith.shrui" if shift > 0 else "arith.shli"
    placed = t.binary(name, word, t.constant(abs(shift), words), words)
    placed = t.binary("arith.andi", placed, mask, words)
    placed = t.binary("arith.ori", placed, sixteens, words)
    return t.op(f"vector.bitcast {placed} : {words} to vector<{2 * target.lanes}xbf16>")


def _widened(t: Text, half: str, types: Lanes) -> str:
    return t.op(f"arith.extf {half} : {types.of('f16')} to {types.of('f32')}")
