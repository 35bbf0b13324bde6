"""The linear kernel: out = x · Wᵀ + bias on packed weights, for any number of tokens.

Weights lie in panels of `Target.panel` outputs side by side over all of K, in a weight format (see
`formats`), so that one token streams them once and many tokens reuse a panel from cache. Here every
output is one chain of multiply-adds over k = 0, 1, …, K-1, started from the bias (from zero where
the format has a scale for each output: chain · scale + bias is the last step): tiles, cache blocks
and threads only decide who computes which chain, so results are bit-identical for any token count
and team.
"""

from functools import partial

from buddy_pipeline.compile.formats.base import (
    WeightFormat,
    most_depth,
    row_bytes,
    tile_rows,
    weights_ahead,
)
from buddy_pipeline.compile.kernels.linear_outputs import LinearOutputs, near_bytes
from buddy_pipeline.compile.kernels.linear_parts import (
    BLOCK_TILES,
    SIGNATURE,
    SIZES,
    ceil_div,
    linear_name,
)
from buddy_pipeline.compile.kernels.linear_tile import (
    BLOCK_ARGS,
    LinearTile,
    call_tile,
    sizes_of_several,
)
from buddy_pipeline.compile.kernels.matrix_linear import MatrixLinear, matrix_scratch_bytes
from buddy_pipeline.compile.kernels.step import thread_share
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


def linear_scratch_bytes(target: Target, form: WeightFormat, depth: int) -> int:
    """Bytes of scratch per thread that the kernel needs for K = `depth`."""
    if form.registers(target).matrix:
        return matrix_scratch_bytes(target, depth)
    activation = form.activation(target)
    blocks = -(-depth // most_depth(target, form, activation))
    rows = max(BLOCK_TILES, blocks) * tile_rows(target, form)
    near = near_bytes(target, BLOCK_TILES * tile_rows(target, form))
    return near + rows * row_bytes(target, activation)


def emit_linear(target: Target, form: WeightFormat) -> str:
    """MLIR text of the module that holds the kernel of a weight format."""
    emitter = MatrixLinear if form.registers(target).matrix else _Linear
    return str(emitter(target, form).emit())


_RANGE_ARGS = [
    ("a", "!llvm.ptr"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("w", "!llvm.ptr"),
    ("bias", "!llvm.ptr"),
    ("depth", "i64"),
    ("low", "i64"),
    ("high", "i64"),
]
_COPY_ARGS = [
    ("x", "!llvm.ptr"),
    ("ldx", "i64"),
    ("to", "!llvm.ptr"),
    ("rows", "i64"),
    ("depth", "i64"),
]
_PANEL_ARGS = [*BLOCK_ARGS, ("following", "!llvm.ptr"), ("rows", "i64")]
_MANY_ARGS = [*SIZES, ("low", "i64"), ("high", "i64"), ("scratch", "!llvm.ptr")]


class _Linear(LinearOutputs):
    """Writes the functions of the kernel that works in registers."""

    def emit(self) -> Text:
        """All functions, callees first."""
        sizes = range(1, self.tile_rows + 1)
        for rows in sizes:
            LinearTile(self, rows).emit()
        self._copy_rows()
        for rows in sizes:
            self._few_tokens(rows)
        self._panel_tiles()
        self._many_tokens()
        self._entry()
        return self.t

    def _copy_rows(self) -> None:
        """`copy_rows(x, ldx, to, rows, depth)`: rows of x as tiles read them, `row_bytes` apart.

        Rows are packed in the format's kind of activation, and end in zeros up to a
        whole unit.
        """
        t = self.t
        with t.function("copy_rows", _COPY_ARGS, private=True):
            end = t.mul(ceil_div(t, "%depth", self.form.unit), t.constant(self.form.unit))
            with t.loop(t.constant(0), "%rows", t.constant(1)) as row:
                source = t.gep("%x", t.mul(row.index, "%ldx"))
                to = t.gep("%to", t.mul(row.index, t.constant(self.row_bytes)), "i8")
                self.activation.emit_row(t, self.target, source, to, "%depth", end)
            t.line("return")

    def _few_tokens(self, rows: int) -> None:
        """`few_tokens_R(…)`: one tile of R tokens, packed `[K block][R][row_bytes]` in %a, over
        panels low … high. Each runs through all of K while its outputs stay in L1; several panels
        at once would be several streams of weights, which are read more slowly.
        """
        t = self.t
        with t.function(f"few_tokens_{rows}", _RANGE_ARGS, private=True):
            zero, one, block = t.constant(0), t.constant(1), self.block()
            panel_size = self.panel_bytes()
            unit = t.constant(self.form.unit_bytes(self.target.panel))
            with t.loop("%low", "%high", one) as panel:
                scales = t.gep("%w", t.mul(panel.index, panel_size), "i8")
                c = t.gep("%out", t.mul(panel.index, t.constant(self.target.panel)))
                bias = self.bias_at(panel.index)
                with t.loop(zero, "%depth", block) as k:
                    depth = self.block_depth(k.index, block)
                    number = t.binary("arith.divui", k.index, block)
                    a = t.gep("%a", t.mul(number, t.constant(rows * self.row_bytes)), "i8")
                    wk = self.weights_at(scales, k.index)
                    ends = self.ends(k.index, depth)
                    ahead = weights_ahead(t, self.target, wk, panel_size)
                    call = [a, wk, c, "%ldo", depth, bias, scales, *ends, ahead, unit]
                    call_tile(self, rows, call)
            t.line("return")

    def _many_tokens(self) -> None:
        """`many_tokens(…)`: blocks of tokens × K; the team shares (token block, panel) units."""
        t = self.t
        with t.function("many_tokens", _MANY_ARGS, private=True):
            zero, one, block = t.constant(0), t.constant(1), self.block()
            panel_size = self.panel_bytes()
            blocks = ceil_div(t, "%tokens", self.tile_rows * BLOCK_TILES)
            with t.loop(zero, blocks, one) as b:
                # The part of this thread's unit range that lies in token block b.
                base = t.mul(b.index, "%panels")
                low = t.binary("arith.maxsi", t.binary("arith.subi", "%low", base), zero)
                high = t.binary("arith.minsi", t.binary("arith.subi", "%high", base), "%panels")
                row_low, row_high = thread_share(t, "%tokens", b.index, blocks)
                rows = t.binary("arith.subi", row_high, row_low)
                out = t.gep("%out", t.mul(row_low, "%ldo"))
                at_once = t.compare("uge", block, "%depth")
                out, ldo, around = self.outputs(at_once, out, "%scratch")
                packed = t.gep("%scratch", self.near_bytes, "i8")
                mine = t.compare("slt", low, high)
                with t.loop(zero, t.select(mine, "%depth", zero, "i64"), block) as k:
                    depth = self.block_depth(k.index, block)
                    first, last = self.ends(k.index, depth)
                    x = t.gep(t.gep("%x", t.mul(row_low, "%ldx")), k.index)
                    self.call("copy_rows", _COPY_ARGS, [x, "%ldx", packed, rows, depth])
                    with t.loop(low, high, one) as panel:
                        scales = t.gep("%w", t.mul(panel.index, panel_size), "i8")
                        w = self.weights_at(scales, k.index)
                        c = self.column(out, panel.index, around)
                        following = t.gep(w, panel_size, "i8")
                        values = [packed, w, c, ldo, depth, self.bias_at(panel.index), scales]
                        values += [first, last, following, rows]
                        self.call("panel_tiles", _PANEL_ARGS, values)
                        with t.when(last):
                            self.finish_group(c, ldo, row_low, rows, panel.index)
            t.line("return")

    def _panel_tiles(self) -> None:
        """`panel_tiles(…)`: `rows` tokens by one panel over a K block, in tiles that each ask for a
        part of what the %following panel has there."""
        t = self.t
        with t.function("panel_tiles", _PANEL_ARGS, private=True):
            zero, one = t.constant(0), t.constant(1)
            unit = t.constant(self.form.unit_bytes(self.target.panel))
            units = ceil_div(t, "%depth", self.form.unit)
            tiles = ceil_div(t, "%rows", self.tile_rows)
            pace = t.binary("arith.ceildivui", unit, tiles)
            with t.loop(zero, tiles, one) as tile:
                start, end = thread_share(t, "%rows", tile.index, tiles)
                a = t.gep("%a", t.mul(start, t.constant(self.row_bytes)), "i8")
                c = t.gep("%c", t.mul(start, "%ldc"))
                part = t.mul(t.mul(units, tile.index), pace)
                ahead = [t.gep("%following", part, "i8"), pace]
                call = [a, "%w", c, "%ldc", "%depth", "%bias", "%scales", "%first", "%last", *ahead]
                t.switch(
                    t.binary("arith.subi", end, start),
                    {size: partial(call_tile, self, size, call) for size in sizes_of_several(self)},
                )
            t.line("return")

    def _entry(self) -> None:
        """The kernel: chooses by token count who computes what."""
        t, most = self.t, self.tile_rows
        with t.function(linear_name(self.form), SIGNATURE):
            zero, block = t.constant(0), self.block()
            low, high = self.share(t.constant(1))

            def few(rows: int) -> None:
                with t.loop(zero, "%depth", block) as k:
                    depth = self.block_depth(k.index, block)
                    number = t.binary("arith.divui", k.index, block)
                    to = t.gep("%scratch", t.mul(number, t.constant(rows * self.row_bytes)), "i8")
                    rows_at_k = [t.gep("%x", k.index), "%ldx", to, "%tokens", depth]
                    self.call("copy_rows", _COPY_ARGS, rows_at_k)
                values = ["%scratch", "%out", "%ldo", "%w", "%bias", "%depth", low, high]
                self.call(f"few_tokens_{rows}", _RANGE_ARGS, values)

            t.switch("%tokens", {rows: partial(few, rows) for rows in range(1, most + 1)})
            with t.when(t.compare("ule", "%tokens", t.constant(most))):
                outputs = t.gep("%out", t.mul(low, t.constant(self.target.panel)))
                self.finish(outputs, "%ldo", t.constant(0), "%tokens", low, high)
            with t.when(t.compare("ugt", "%tokens", t.constant(most))):
                first, last = self.share(ceil_div(t, "%tokens", most * BLOCK_TILES))
                given = [f"%{name}" for name, _ in SIZES]
                self.call("many_tokens", _MANY_ARGS, [*given, first, last, "%scratch"])
            t.line("return")
