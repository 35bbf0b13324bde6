"""Reading one block of 32 codes of a packed panel into registers: a vector of outputs, or one."""

from dataclasses import dataclass, replace

from buddy_pipeline.compile.formats.block_layout import GROUP, GROUPS, NIBBLE_WORDS
from buddy_pipeline.compile.kernels.vector_math import Lanes
from buddy_pipeline.compile.mlir_text import Text


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

    def word(self, number: int) -> str:
        """A word of codes."""
        place = self.t.gep(self.words, number * self.panel, "i32")
        return self.t.load(place, self.types.of("i32"), self._align(4))

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

    def codes(self, group: int, bits: int, runs: int) -> str:
        """The codes of a group, one a byte of an i32; see `block_layout`."""
        t, i = self.t, self.types.of("i32")
        if bits == 8:
            return self.word(group)
        each = GROUPS // runs
        run, number = divmod(group, each)
        upper_half, place = divmod(number, each // 2)
        word = self.word(run * each // 2 + place)
        if upper_half:
            word = t.binary("arith.shrui", word, t.constant(4, i), i)
        word = t.binary("arith.andi", word, t.constant(0x0F0F0F0F, i), i)
        above = bits - 4
        if not above:
            return word
        share = 8 // above  # groups whose upper bits share a word
        upper = self.word(NIBBLE_WORDS + group // share)
        shift = above * (group % share) - 4
        if shift:
            name = "arith.shrui" if shift > 0 else "arith.shli"
            upper = t.binary(name, upper, t.constant(abs(shift), i), i)
        mask = ((1 << above) - 1 << 4) * 0x01010101
        upper = t.binary("arith.andi", upper, t.constant(mask, i), i)
        return t.binary("arith.ori", word, upper, i)

    def code(self, codes: str, k: int, signed: bool) -> str:
        """Byte k of a group's codes, as an i32."""
        t, i = self.t, self.types.of("i32")
        if signed:
            top = t.binary("arith.shli", codes, t.constant(24 - 8 * k, i), i)
            return t.binary("arith.shrsi", top, t.constant(24, i), i)
        low = t.binary("arith.shrui", codes, t.constant(8 * k, i), i)
        return t.binary("arith.andi", low, t.constant(255, i), i)

    def _align(self, size: int) -> int:
        return size * max(1, self.types.lanes)


def groups_of_run(run: int, bits: int, runs: int) -> list[int]:
    """The groups of a run, those that share a word one after the other."""
    each = GROUPS // runs
    first = run * each
    if bits == 8:
        return list(range(first, first + each))
    return [first + place + half for place in range(each // 2) for half in (0, each // 2)]


def group_elements(group: int) -> range:
    """The elements of a group in its block."""
    return range(GROUP * group, GROUP * (group + 1))
