"""The linear kernel of a CPU with a matrix unit (AMX): tiles of 16 tokens by 16 outputs by 32 k.

The unit takes packed panels of bf16 pairs as they are, and activations in tiles of bf16. A product
of tiles adds, to each output, the sum of its 16 products at even k and that of its 16 at odd k.
That is its whole effect, whatever the other rows hold and however many there are, and tiles follow
each other over K in order from the bias on; so here too a token's result is the same bits in any
batch. A few tokens are multiplied in vector registers to the same bits (see `matrix_few`).

The unit is so fast that everything outside the second cache is slow beside it: a token block's
activations are packed once to stay there, a panel's outputs stay until its chains are whole, and
weights are asked for evenly, by each tile a part of those that come next.
"""

from functools import partial

from buddy_pipeline.compile.formats.base import MATRIX_ROWS
from buddy_pipeline.compile.kernels.linear_outputs import near_bytes
from buddy_pipeline.compile.kernels.linear_parts import (
    BLOCK_TILES,
    SIGNATURE,
    ceil_div,
    linear_name,
)
from buddy_pipeline.compile.kernels.matrix_few import (
    MOST_FEW,
    FewTokens,
    call_few_tokens,
    emit_round_rows,
    few_tokens_bytes,
)
from buddy_pipeline.compile.kernels.matrix_pack import (
    PACKED_STEP,
    call_pack_rows,
    emit_pack_rows,
    emit_pad_weights,
)
from buddy_pipeline.compile.kernels.matrix_panels import (
    PANELS_ARGS,
    MatrixPanels,
    fixed_scratch_bytes,
)
from buddy_pipeline.compile.kernels.matrix_tiles import TILE_DEPTH, emit_configuration
from buddy_pipeline.compile.kernels.step import thread_share
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Most bytes of packed activations: half of the second cache of every CPU with AMX.
_PACKED_BYTES = 1 << 20


def matrix_scratch_bytes(target: Target, depth: int) -> int:
    """Bytes of scratch per thread for K = `depth`: packed activations and what is before them, or
    the rows of few tokens."""
    steps = -(-depth // TILE_DEPTH)
    packed = min(_PACKED_BYTES, BLOCK_TILES * steps * PACKED_STEP)
    before = fixed_scratch_bytes(target) + near_bytes(target, BLOCK_TILES * 2 * MATRIX_ROWS)
    return max(before + packed, few_tokens_bytes(depth))


class MatrixLinear(MatrixPanels):
    """Writes the functions of the kernel that works in the matrix unit."""

    def emit(self) -> Text:
        """All functions, callees first."""
        emit_pack_rows(self)
        emit_pad_weights(self)
        self.emit_panels()
        self._in_tiles()
        emit_round_rows(self)
        for rows in range(1, MOST_FEW + 1):
            FewTokens(self, rows).emit()
        self._entry()
        return self.t

    def _in_tiles(self) -> None:
        """`in_tiles(…)`: blocks of tokens × K; the team shares (token block, panel) units."""
        t = self.t
        with t.function("in_tiles", SIGNATURE, private=True):
            zero, one = t.constant(0), t.constant(1)
            blocks = ceil_div(t, "%tokens", self.tile_rows * BLOCK_TILES)
            unit_low, unit_high = self.share(blocks)
            with t.loop(zero, blocks, one) as b:
                # The part of this thread's unit range that lies in token block b.
                base = t.mul(b.index, "%panels")
                low = t.binary("arith.maxsi", t.binary("arith.subi", unit_low, base), zero)
                high = t.binary("arith.minsi", t.binary("arith.subi", unit_high, base), "%panels")
                row_low, row_high = thread_share(t, "%tokens", b.index, blocks)
                rows = t.binary("arith.subi", row_high, row_low)
                widest = t.binary("arith.minui", rows, t.constant(self.tile_rows))
                emit_configuration(t, self.config("whole"), widest)
                emit_configuration(t, self.config("rest"), self.rest(rows))
                x = t.gep("%x", t.mul(row_low, "%ldx"))
                out = t.gep("%out", t.mul(row_low, "%ldo"))
                # As much of K at once as stays in the second cache when it is packed.
                steps = t.constant(_PACKED_BYTES // PACKED_STEP)
                most = t.binary("arith.divui", steps, ceil_div(t, rows, self.tile_rows))
                part = self.even_part("%depth", t.mul(most, t.constant(TILE_DEPTH)))
                mine = t.compare("slt", low, high)
                is_many = t.compare("ugt", rows, t.constant(MATRIX_ROWS))
                at_once = t.binary("arith.andi", is_many, t.compare("uge", part, "%depth"), "i1")
                out, ldo, around = self.outputs(at_once, out, self.near_outputs())
                with t.loop(zero, t.select(mine, "%depth", zero, "i64"), part) as k:
                    length = self.part_length(k.index, part, "%depth")
                    pack = [t.gep(x, k.index), "%ldx", self.packed(), rows, length]
                    call_pack_rows(self, pack)
                    panels = [out, ldo, "%w", "%bias", rows, "%depth", k.index, length]
                    panels += [low, high, row_low, around, "%turns", "%epilogue", "%context"]
                    panels.append("%scratch")
                    t.choose(
                        is_many,
                        partial(self.call, "many_tiles", PANELS_ARGS, panels),
                        partial(self.call, "one_tile", PANELS_ARGS, panels),
                        [],
                    )
            t.line('llvm.call_intrinsic "llvm.x86.tilerelease"() : () -> ()')
            t.line("return")

    def _entry(self) -> None:
        """The kernel: chooses by token count who computes what."""
        t = self.t
        with t.function(linear_name(self.form), SIGNATURE):
            few = range(1, MOST_FEW + 1)
            t.switch("%tokens", {rows: partial(call_few_tokens, self, rows) for rows in few})
            with t.when(t.compare("ugt", "%tokens", t.constant(MOST_FEW))):
                t.call("in_tiles", [(f"%{name}", kind) for name, kind in SIGNATURE])
            t.line("return")
