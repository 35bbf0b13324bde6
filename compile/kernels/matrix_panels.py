"""Panels of outputs by all rows of a token block, in the matrix unit."""

from functools import partial

from buddy_pipeline.compile.formats.base import MATRIX_ROWS, WeightFormat
from buddy_pipeline.compile.kernels.linear_outputs import LinearOutputs
from buddy_pipeline.compile.kernels.linear_parts import ceil_div
from buddy_pipeline.compile.kernels.matrix_pack import (
    PACKED_STEP,
    call_pad_weights,
    has_rest,
    weight_step,
)
from buddy_pipeline.compile.kernels.matrix_product import STREAM, MatrixProduct, call_product
from buddy_pipeline.compile.kernels.matrix_tiles import CONFIG_BYTES, TILE_DEPTH, emit_unit
from buddy_pipeline.compile.mlir_text import CACHE_LINE
from buddy_pipeline.compile.target import Target

#: One configuration for whole tiles, or all there are, one for the last tokens: to change it at
#: each panel takes a twentieth of the time of 17 to 31 tokens.
CONFIGS = ("whole", "rest")
#: Panels at once for the tokens of one tile: two streams from memory.
_FEW_PANELS = 2
#: Most k of a cache block: its weights, and what passes by of outputs, stay in the first cache of
#: every CPU with AMX, 48 KiB (weights from memory, 256 tokens: 288 k 1,142 GFLOP/s, 576 1,214).
_MOST_DEPTH = 576
PANELS_ARGS = [
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("w", "!llvm.ptr"),
    ("bias", "!llvm.ptr"),
    ("rows", "i64"),
    ("depth", "i64"),
    ("first", "i64"),
    ("length", "i64"),
    ("low", "i64"),
    ("high", "i64"),
    ("row", "i64"),
    ("around", "i64"),
    ("turns", "i64"),
    ("epilogue", "!llvm.ptr"),
    ("context", "!llvm.ptr"),
    ("scratch", "!llvm.ptr"),
]
_ROWS_ARGS = [
    ("a", "!llvm.ptr"),
    ("w", "!llvm.ptr"),
    ("c", "!llvm.ptr"),
    ("ldo", "i64"),
    ("rows", "i64"),
    ("length", "i64"),
    ("depth", "i64"),
    ("goes_on", "i1"),
    ("ahead", "!llvm.ptr"),
    ("scratch", "!llvm.ptr"),
]
_BIAS_ARGS = [("bias", "!llvm.ptr"), ("c", "!llvm.ptr"), ("ldc", "i64"), ("rows", "i64")]


def fixed_scratch_bytes(target: Target) -> int:
    """Bytes before what depends on sizes: configurations, and weights of last steps."""
    return len(CONFIGS) * CONFIG_BYTES + _FEW_PANELS * weight_step(target)


class MatrixPanels(LinearOutputs):
    """Writes `one_tile(…)` and `many_tiles(…)`: panels low … high over a part of K (`length` from
    `first` on) for the tokens whose packed activations are in scratch."""

    def __init__(self, target: Target, form: WeightFormat) -> None:
        """The format is bf16 pairs, and a panel two tiles wide."""
        assert form.unit_bytes(target.panel) == 4 * target.panel and form.unit == 2
        assert target.panel == 2 * MATRIX_ROWS
        super().__init__(target, form)

    def emit_panels(self) -> None:
        """Both, and what they call but for `pad_weights`."""
        MatrixProduct(self, 1, _FEW_PANELS, STREAM).emit()
        MatrixProduct(self, 1, 1, STREAM).emit()
        for lines in dict.fromkeys(self._shares().values()):
            MatrixProduct(self, 2, 1, lines).emit()
            if not self._is_all(lines):
                MatrixProduct(self, 1, 1, lines).emit()
            self._row_tiles(lines)
        self._begin_with_bias()
        self._one_tile()
        self._many_tiles()

    def _shares(self) -> dict[int, int]:
        """Lines of weights that each two tiles of so many (of this many or more, the last) ask for
        with each step of their own. Shares are rounded up to powers of two for fewer functions;
        what that is too much is asked for twice, the second time of a near cache."""
        lines = weight_step(self.target) // CACHE_LINE
        return {tiles: -(-lines // (1 << tiles.bit_length() - 1)) for tiles in range(1, 9)}

    def _is_all(self, lines: int) -> bool:
        """Whether a share is that of a panel's only two tiles."""
        return lines == self._shares()[1]

    def _begin_with_bias(self) -> None:
        """`begin_with_bias(bias, c, ldc, rows)`: a panel's bias in every row of c."""
        t, target = self.t, self.target
        with t.function("begin_with_bias", _BIAS_ARGS, private=True):
            align = target.lanes * 4
            places = range(0, target.panel, target.lanes)
            bias = [t.load(t.gep("%bias", at), self.vector, align) for at in places]
            with t.loop(t.constant(0), "%rows", t.constant(1)) as row:
                c = t.gep("%c", t.mul(row.index, "%ldc"))
                for at, value in zip(places, bias, strict=True):
                    t.store(value, t.gep(c, at), self.vector, align)
            t.line("return")

    def _one_tile(self) -> None:
        """`one_tile(…)`: panels low … high for the tokens of one tile, two panels at a time."""
        t = self.t
        with t.function("one_tile", PANELS_ARGS, private=True):
            self._use("rest")
            count = t.binary("arith.subi", "%high", "%low")
            odd = t.op(f"arith.remui {count}, {t.constant(_FEW_PANELS)} : i64")
            middle = t.binary("arith.subi", "%high", odd)

            def panels(number: str, at_once: int) -> None:
                goes_on = t.constant(0, "i1")
                for p in reversed(range(at_once)):
                    w, c, goes_on = self._begin(t.add(number, t.constant(p)), p)
                values = {"a": self.packed(), "w": w, "wstride": self.panel_bytes(), "c": c}
                values |= {"wend": self._ends(), "ldc": "%ldo", "depth": "%length"}
                call_product(self, 1, at_once, STREAM, values | {"goes_on": goes_on})

            with t.loop("%low", middle, t.constant(_FEW_PANELS)) as panel:
                panels(panel.index, _FEW_PANELS)
            with t.loop(middle, "%high", t.constant(1)) as panel:
                panels(panel.index, 1)
            with t.when(self._is_last_part()):
                outputs = t.gep("%out", t.mul("%low", t.constant(self.target.panel)))
                self.finish(outputs, "%ldo", "%row", "%rows", "%low", "%high")
            t.line("return")

    def _many_tiles(self) -> None:
        """`many_tiles(…)`: panels low … high for two and more tiles of tokens. A panel's blocks of
        K follow each other, so that its outputs stay in a near cache."""
        t = self.t
        with t.function("many_tiles", PANELS_ARGS, private=True):
            self._use("whole")
            block = self.even_part("%length", t.constant(_MOST_DEPTH))
            most = t.constant(max(self._shares()))
            shares = t.binary("arith.minui", ceil_div(t, "%rows", self.tile_rows), most)
            is_whole = self._is_last_part()
            with t.loop("%low", "%high", t.constant(1)) as panel:
                w, c, begun = self._begin(panel.index)
                with t.loop(t.constant(0), "%length", block) as k:
                    depth = self.part_length(k.index, block, "%length")
                    is_first = t.compare("eq", k.index, t.constant(0))
                    goes_on = t.select(is_first, begun, t.constant(1, "i1"), "i1")
                    steps = t.binary("arith.divui", k.index, t.constant(TILE_DEPTH))
                    a = t.gep(self.packed(), t.mul(steps, t.constant(PACKED_STEP)), "i8")
                    here = self._steps_on(w, k.index)
                    is_last = t.compare("eq", t.add(k.index, depth), "%length")
                    following = t.gep(w, self.panel_bytes(), "i8")
                    later = self._steps_on(here, depth)
                    ahead = t.select(is_last, following, later, "!llvm.ptr")
                    values = [a, here, c, "%ldo", "%rows", "%length", depth, goes_on, ahead]
                    values.append("%scratch")
                    t.switch(
                        shares,
                        {
                            tiles: partial(self.call, f"row_tiles_{lines}", _ROWS_ARGS, values)
                            for tiles, lines in self._shares().items()
                        },
                    )
                with t.when(is_whole):
                    self.finish_group(c, "%ldo", "%row", "%rows", panel.index)
            t.line("return")

    def _is_last_part(self) -> str:
        """Whether chains are whole when this part of K is done."""
        return self.t.compare("eq", self.t.add("%first", "%length"), "%depth")

    def _row_tiles(self, lines: int) -> None:
        """`row_tiles_L(…)`: all rows by one panel over a block of K; each two tiles ask for as much
        as L lines of every step of the weights that come next."""
        t = self.t
        with t.function(f"row_tiles_{lines}", _ROWS_ARGS, private=True):
            left = self.rest("%rows")
            whole = t.binary("arith.divui", "%rows", t.constant(self.tile_rows))
            steps = ceil_div(t, "%length", TILE_DEPTH)

            def product(number: str, tiles: int) -> list[str]:
                """The 32 tokens, or the last up to 16, of this number."""
                a = t.gep("%a", t.mul(t.mul(number, steps), t.constant(PACKED_STEP)), "i8")
                row = t.mul(number, t.constant(self.tile_rows))
                c = t.gep("%c", t.mul(row, "%ldo"))
                ahead = t.gep("%ahead", t.mul(number, t.constant(lines * CACHE_LINE // 2)), "i8")
                values = {"a": a, "w": "%w", "wend": self._ends(), "c": c, "ldc": "%ldo"}
                values |= {"depth": "%depth", "goes_on": "%goes_on", "ahead": ahead}
                call_product(self, tiles, 1, lines, values)
                return []

            if self._is_all(lines):  # one tile alone has come another way
                product(t.constant(0), 2)
            else:
                with t.loop(t.constant(0), whole, t.constant(1)) as number:
                    product(number.index, 2)
                with t.when(t.compare("ugt", left, t.constant(0))):
                    self._use("rest")
                    two = t.compare("ugt", left, t.constant(MATRIX_ROWS))
                    t.choose(two, partial(product, whole, 2), partial(product, whole, 1), [])
                    self._use("whole")
            t.line("return")

    def _begin(self, panel: str, place: int = 0) -> tuple[str, str, str]:
        """Before the products of a panel, the `place`-th of those side by side: its weights and
        outputs, and whether sums start from these. Writes the bias there where chains begin, and
        the weights of a last part of a step with zeros behind them."""
        t = self.t
        w = self.weights_at(t.gep("%w", t.mul(panel, self.panel_bytes()), "i8"), "%first")
        c = self.column("%out", panel, "%around")
        with t.when(has_rest(t, "%length")):
            to = t.gep(self._ends(), place * weight_step(self.target), "i8")
            call_pad_weights(self, [w, to, "%length"])
        no_bias = t.is_null("%bias")
        is_first = t.compare("eq", "%first", t.constant(0))
        clear = t.op(f"arith.andi {is_first}, {no_bias} : i1")
        with t.when(t.op(f"arith.xori {is_first}, {clear} : i1")):
            self.call("begin_with_bias", _BIAS_ARGS, [self.bias_at(panel), c, "%ldo", "%rows"])
        return w, c, t.binary("arith.xori", clear, t.constant(1, "i1"), "i1")

    def _steps_on(self, w: str, k: str) -> str:
        """Weights `k`, a multiple of a step, further on."""
        t = self.t
        steps = t.binary("arith.divui", k, t.constant(TILE_DEPTH))
        return t.gep(w, t.mul(steps, t.constant(weight_step(self.target))), "i8")

    def rest(self, rows: str) -> str:
        """Rows behind the last whole two tiles."""
        return self.t.op(f"arith.remui {rows}, {self.t.constant(self.tile_rows)} : i64")

    def _use(self, config: str) -> None:
        """Gives the unit's registers the shapes of a configuration."""
        emit_unit(self.t, "ldtilecfg", (self.config(config), "!llvm.ptr"))

    # Scratch: configurations, weights of last steps, packed activations.

    def config(self, name: str) -> str:
        """Address of a configuration."""
        return self.t.gep("%scratch", CONFIGS.index(name) * CONFIG_BYTES, "i8")

    def _ends(self) -> str:
        return self.t.gep("%scratch", len(CONFIGS) * CONFIG_BYTES, "i8")

    def near_outputs(self) -> str:
        """Address of outputs that stay near."""
        return self.t.gep("%scratch", fixed_scratch_bytes(self.target), "i8")

    def packed(self) -> str:
        """Address of the packed activations."""
        return self.t.gep(self.near_outputs(), self.near_bytes, "i8")
