"""The matrix unit (AMX): its tile registers and how we deal them out.

A register has up to 16 rows of 64 bytes. Registers, instructions and the configuration are those of
Intel's manual (Software Developer's Manual, volume 1, chapter "Programming with Intel AMX").
"""

from buddy_pipeline.compile.formats.base import MATRIX_ROWS
from buddy_pipeline.compile.mlir_text import Text

#: k of one tile, and bytes of one of its rows: 32 bf16 of a token, or 16 outputs' pairs.
TILE_DEPTH = 32
TILE_ROW_BYTES = 64
#: Sums of two row tiles by two column tiles, the tokens' tiles, the weights'.
SUMS = (0, 1, 2, 3)
TOKENS = (4, 5)
WEIGHTS = (6, 7)
#: Column tiles side by side.
WIDE = 2
#: The registers' shapes, as `ldtilecfg` reads them: the palette, from byte 16 on two bytes with the
#: length of a row, from byte 48 on a byte with the number of rows.
CONFIG_BYTES = 64


def emit_unit(t: Text, instruction: str, *operands: int | tuple[str, str]) -> None:
    """Writes one instruction; tile registers are integers, other operands (name, type)."""
    values = [
        (t.constant(operand, "i8"), "i8") if isinstance(operand, int) else operand
        for operand in operands
    ]
    names, kinds = (", ".join(each) for each in zip(*values, strict=True))
    t.line(f'llvm.call_intrinsic "llvm.x86.{instruction}"({names}) : ({kinds}) -> ()')


def emit_configuration(t: Text, to: str, rows: str) -> None:
    """Stores the registers' shapes for `rows` tokens, at most two tiles of them, at address `to`.

    Tokens for one tile only leave the registers of the other to a second pair of columns.
    """
    upper = t.binary("arith.minui", rows, t.constant(MATRIX_ROWS))
    more = t.binary("arith.subi", rows, upper)
    lower = t.select(t.compare("eq", more, t.constant(0)), upper, more, "i64")
    shape = t.constant(sum(MATRIX_ROWS << 8 * register for register in WEIGHTS))
    for r, height in enumerate((upper, lower)):
        registers = (*SUMS[WIDE * r : WIDE * (r + 1)], TOKENS[r])
        each = t.constant(sum(1 << 8 * register for register in registers))
        # A register with columns and without rows is an error, whether it is used or not.
        shape = t.add(shape, t.mul(t.binary("arith.maxui", height, t.constant(1)), each))
    wide = t.constant(sum(TILE_ROW_BYTES << 16 * register for register in range(4)))
    words = {0: t.constant(1), 2: wide, 3: wide, 6: shape}
    for word in range(CONFIG_BYTES // 8):
        t.store(words.get(word, t.constant(0)), t.gep(to, word, "i64"), "i64", 8)
