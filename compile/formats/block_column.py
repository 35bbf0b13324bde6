"""Reading one block of 32 codes of a packed panel into registers: a vector of outputs, or one."""

from dataclasses import dataclass, replace

from buddy_pipeline.compile.formats.block_layout import GROUPS, NIBBLE_WORDS
from buddy_pipeline.compile.kernels.vector_math import Lanes
from buddy_pipeline.compile.mlir_text import Text

#: Times a byte: that byte four times.
_EACH_BYTE = 0x01010101


@dataclass(frozen=True)
class Column:
    """Where the numbers of these outputs lie: every next number is `panel` outputs further."""

    t: Text
    types: Lanes
    panel: int
    words: str  # address of the block's first word
    scales: str  # of its first small scale
    halves: str  # of the unit's first 16-bit scale

    def output(self, lane: str) -> "Column":
        """A single output, `lane` (i64) outputs further."""
        gep = self.t.gep
        return replace(
            self,
            types=Lanes(0),
            words=gep(self.words, lane, "i32"),
            scales=gep(self.scales, lane, "i8"),
            halves=gep(self.halves, lane, "f16"),
        )

    def scale(self, number: int, signed: bool) -> str:
        """A small scale as f32."""
        t, i, f, byte = self.t, *map(self.types.of, ("i32", "f32", "i8"))
        value = t.load(t.gep(self.scales, number * self.panel, "i8"), byte, self._align(1))
        value = t.op(f"arith.{'extsi' if signed else 'extui'} {value} : {byte} to {i}")
        return t.op(f"arith.sitofp {value} : {i} to {f}")

    def half(self, number: int) -> str:
        """A 16-bit scale as f32."""
        t, short = self.t, self.types.of("f16")
        value = t.load(t.gep(self.halves, number * self.panel, "f16"), short, self._align(2))
        return t.op(f"arith.extf {value} : {short} to {self.types.of('f32')}")

    def codes(self, group: str, bits: int, runs: int) -> str:
        """The codes of a group (i64), one a byte of an i32; see `block_layout`.

        Written for any group, inside a loop or as a constant, from which LLVM makes one shift.
        """
        t, i = self.t, self.types.of("i32")
        if bits == 8:
            return self.word(group)

        def split(value: str, by: int) -> tuple[str, str]:
            divisor = t.constant(by)
            quotient = t.binary("arith.divui", value, divisor)
            return quotient, t.op(f"arith.remui {value}, {divisor} : i64")

        def field(word: str, number: str, size: int) -> str:
            """Bits `number` · size and up of every byte, as the lowest."""
            shift = t.mul(number, t.constant(size))
            shift = self._spread(t.op(f"arith.trunci {shift} : i64 to i32"))
            moved = t.binary("arith.shrui", word, shift, i)
            return t.binary("arith.andi", moved, t.constant(((1 << size) - 1) * _EACH_BYTE, i), i)

        half = GROUPS // runs // 2
        part, place = split(group, half)
        run, is_upper = split(part, 2)
        word = self.word(t.add(t.mul(run, t.constant(half)), place))
        lower = field(word, is_upper, 4)
        above = bits - 4
        if not above:
            return lower
        number, share = split(group, 8 // above)
        upper = field(self.word(t.add(number, t.constant(NIBBLE_WORDS))), share, above)
        return t.binary("arith.ori", lower, t.binary("arith.shli", upper, t.constant(4, i), i), i)

    def code(self, codes: str, k: int, signed: bool) -> str:
        """Byte k of a group's codes, as an i32."""
        t, i = self.t, self.types.of("i32")
        if signed:
            top = t.binary("arith.shli", codes, t.constant(24 - 8 * k, i), i)
            return t.binary("arith.shrsi", top, t.constant(24, i), i)
        low = t.binary("arith.shrui", codes, t.constant(8 * k, i), i)
        return t.binary("arith.andi", low, t.constant(255, i), i)

    def word(self, number: str) -> str:
        """A word of codes."""
        t = self.t
        place = t.gep(self.words, t.mul(number, t.constant(self.panel)), "i32")
        return t.load(place, self.types.of("i32"), self._align(4))

    def _spread(self, value: str) -> str:
        """An i32 in all lanes."""
        return self.t.broadcast(value, self.types.of("i32"), "i32") if self.types.lanes else value

    def _align(self, size: int) -> int:
        return size * max(1, self.types.lanes)


def groups_of_run(run: int, bits: int, runs: int) -> list[int]:
    """The groups of a run, those that share a word one after the other."""
    each = GROUPS // runs
    first = run * each
    if bits == 8:
        return list(range(first, first + each))
    return [first + place + half for place in range(each // 2) for half in (0, each // 2)]
