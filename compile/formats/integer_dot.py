"""Dot products of 8-bit integers, four to a lane, in the shape that each kind of CPU has.

Weights come as vectors of 32-bit words with four codes each, activations as four int8 that all
lanes share. A code is unsigned or signed; results are exact.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: int8 activations are symmetric: -127 … 127.
_ACTIVATION = 127


@dataclass(frozen=True)
class Codes:
    """What the codes of a format are."""

    largest: int  # absolute value
    signed: bool


#: (row, vector) → accumulator, vectors of i32.
Sums = dict[tuple[int, int], str]


class IntegerDot(Protocol):
    """One shape of the instruction."""

    def offset(self, codes: Codes) -> int:
        """What the instruction adds to every code: chains start from -offset · Σ activations."""

    def emit(
        self,
        t: Text,
        codes: Codes,
        groups: Sequence[int],
        weights: Callable[[int], list[str]],
        activations: Callable[[int, int], str],
        starts: Mapping[tuple[int, int], str],
    ) -> Sums:
        """Adds Σ code · activation over `groups` of four to `starts`.

        `weights(group)` writes the words of each vector, `activations(row, group)` those of a row.
        """


@dataclass(frozen=True)
class DotProduct:
    """One instruction for four products and their sum: `vpdpbusd` (unsigned weights) and `sdot`."""

    intrinsic: str
    lanes: int
    unsigned: bool

    def offset(self, codes: Codes) -> int:
        """Signed codes are made unsigned by adding 128, which flips the upper bit."""
        return 128 if self.unsigned and codes.signed else 0

    def emit(
        self,
        t: Text,
        codes: Codes,
        groups: Sequence[int],
        weights: Callable[[int], list[str]],
        activations: Callable[[int, int], str],
        starts: Mapping[tuple[int, int], str],
    ) -> Sums:
        """See `IntegerDot.emit`."""
        words, bytes_ = f"vector<{self.lanes}xi32>", f"vector<{4 * self.lanes}xi8>"
        sums = dict(starts)
        rows = sorted({row for row, _ in starts})
        for group in groups:
            columns = weights(group)
            if self.offset(codes):
                flip = t.constant(-0x7F7F7F80, words)  # 0x80 in every byte
                columns = [t.binary("arith.xori", c, flip, words) for c in columns]
            columns = [t.op(f"vector.bitcast {c} : {words} to {bytes_}") for c in columns]
            for row in rows:
                four = activations(row, group)
                four = t.op(f"vector.bitcast {four} : {words} to {bytes_}")
                for v, column in enumerate(columns):
                    sums[row, v] = t.op(
                        f'llvm.call_intrinsic "{self.intrinsic}"({sums[row, v]}, {column}, '
                        f"{four}) : ({words}, {bytes_}, {bytes_}) -> {words}"
                    )
        return sums


@dataclass(frozen=True)
class PairProduct:
    """x86 without VNNI: products of bytes summed by pairs into 16 bits (`pmaddubsw`), as many of
    these as fit added up, then pairs of 16 bits summed into 32 (`pmaddwd`)."""

    bytes_intrinsic: str
    halves_intrinsic: str
    lanes: int

    def offset(self, codes: Codes) -> int:
        """Signed codes give their sign to the activations."""
        return 0

    def emit(
        self,
        t: Text,
        codes: Codes,
        groups: Sequence[int],
        weights: Callable[[int], list[str]],
        activations: Callable[[int, int], str],
        starts: Mapping[tuple[int, int], str],
    ) -> Sums:
        """See `IntegerDot.emit`."""
        words, halves = f"vector<{self.lanes}xi32>", f"vector<{2 * self.lanes}xi16>"
        sums = dict(starts)
        rows = sorted({row for row, _ in starts})
        ones = t.constant(1, halves)
        at_once = max(1, 0x7FFF // (2 * _ACTIVATION * codes.largest))
        for first in range(0, len(groups), at_once):
            pairs: dict[tuple[int, int], str] = {}
            for group in groups[first : first + at_once]:
                columns = [self._column(t, codes, word) for word in weights(group)]
                for row in rows:
                    four = activations(row, group)
                    for v, column in enumerate(columns):
                        product = self._product(t, column, four)
                        before = pairs.get((row, v))
                        if before is not None:
                            product = t.binary("arith.addi", before, product, halves)
                        pairs[row, v] = product
            for place, pair in pairs.items():
                four = t.op(
                    f'llvm.call_intrinsic "{self.halves_intrinsic}"({pair}, {ones}) : '
                    f"({halves}, {halves}) -> {words}"
                )
                sums[place] = t.binary("arith.addi", sums[place], four, words)
        return sums

    def _column(self, t: Text, codes: Codes, word: str) -> tuple[str, str | None]:
        """Absolute values of the codes and, for signed ones, a mask of which are negative."""
        words, bytes_ = f"vector<{self.lanes}xi32>", f"vector<{4 * self.lanes}xi8>"
        column = t.op(f"vector.bitcast {word} : {words} to {bytes_}")
        if not codes.signed:
            return column, None
        negative = t.binary("arith.shrsi", column, t.constant(7, bytes_), bytes_)
        return t.op(f"math.absi {column} : {bytes_}"), negative

    def _product(self, t: Text, column: tuple[str, str | None], four: str) -> str:
        bytes_ = f"vector<{4 * self.lanes}xi8>"
        size, negative = column
        signed = t.op(f"vector.bitcast {four} : vector<{self.lanes}xi32> to {bytes_}")
        if negative is not None:
            signed = t.binary("arith.xori", signed, negative, bytes_)
            signed = t.binary("arith.subi", signed, negative, bytes_)
        return t.op(
            f'llvm.call_intrinsic "{self.bytes_intrinsic}"({size}, {signed}) : '
            f"({bytes_}, {bytes_}) -> vector<{2 * self.lanes}xi16>"
        )


_PAIRS = {
    256: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    512: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
}


def integer_dot(target: Target) -> IntegerDot | None:
    """The shape that a CPU has; None for one without any."""
    if target.int8_dot == "vpdpbusd":
        name = f"llvm.x86.avx512.vpdpbusd.{target.vector_bits}"
        return DotProduct(name, target.lanes, unsigned=True)
    if target.int8_dot == "sdot":
        return DotProduct("llvm.aarch64.neon.sdot.v4i32.v16i8", target.lanes, unsigned=False)
    if target.int8_dot == "pmaddubsw":
        return PairProduct(*_PAIRS[target.vector_bits], target.lanes)
    return None
