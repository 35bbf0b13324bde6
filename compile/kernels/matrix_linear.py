"""The linear kernel of a CPU with a matrix unit (AMX): tiles of 16 tokens by 16 outputs by 32 k.

The unit takes packed panels of bf16 pairs as they are, and rows of bf16 activations. A product of
tiles adds, to each output, the sum of its 16 products at even k and that of its 16 at odd k. That
is its whole effect, whatever the other rows hold and however many there are, and tiles follow each
other over K in order from the bias on; so here too a token's result is the same bits in any batch.
A few tokens are multiplied in vector registers to the same bits (see `matrix_few`).
"""

from functools import partial

from buddy_pipeline.compile.formats.base import MATRIX_ROWS, WeightFormat, prefetch
from buddy_pipeline.compile.kernels.linear_parts import (
    BLOCK_TILES,
    SIGNATURE,
    LinearParts,
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
from buddy_pipeline.compile.kernels.matrix_tiles import (
    CONFIG_BYTES,
    SUMS,
    TILE_DEPTH,
    TILE_ROW_BYTES,
    TOKENS,
    WEIGHTS,
    WIDE,
    emit_configuration,
    emit_unit,
)
from buddy_pipeline.compile.kernels.step import thread_share
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Panels at once for few tokens: several streams from memory.
_FEW_PANELS = 2
#: One configuration for whole tiles, one for the last tokens.
_CONFIGS = ("whole", "rest")

#: k of a cache block: a panel over it and two tiles of rows fill L1 together.
_MOST_DEPTH = 384
_TILE_ARGS = [
    ("a", "!llvm.ptr"),
    ("w", "!llvm.ptr"),
    ("wstride", "i64"),
    ("wend", "!llvm.ptr"),
    ("c", "!llvm.ptr"),
    ("ldc", "i64"),
    ("depth", "i64"),
    ("goes_on", "i1"),
]
_PAD_ARGS = [("w", "!llvm.ptr"), ("to", "!llvm.ptr"), ("depth", "i64")]
_BIAS_ARGS = [("bias", "!llvm.ptr"), ("c", "!llvm.ptr"), ("ldc", "i64"), ("rows", "i64")]


def matrix_scratch_bytes(target: Target, rows: int, row_bytes: int, depth: int) -> int:
    """Bytes of scratch per thread: `rows` packed rows, configurations, and padded weights; or all
    of K = `depth` for few tokens."""
    ends = _FEW_PANELS * _weight_bytes(target)
    tiles = rows * row_bytes + len(_CONFIGS) * CONFIG_BYTES + ends
    return max(tiles, few_tokens_bytes(depth))


def _weight_bytes(target: Target) -> int:
    """Bytes of a panel over TILE_DEPTH."""
    return 2 * TILE_DEPTH * target.panel


class MatrixLinear(LinearParts):
    """Writes the functions of the kernel that works in the matrix unit."""

    def __init__(self, target: Target, form: WeightFormat) -> None:
        """The format is bf16 pairs, and a panel two tiles wide."""
        assert form.unit_bytes(target.panel) == 4 * target.panel and form.unit == 2
        assert target.panel == 2 * MATRIX_ROWS
        super().__init__(target, form, row_unit=TILE_DEPTH)
        self.weight_bytes = _weight_bytes(target)
        self.most_depth = _MOST_DEPTH

    def emit(self) -> Text:
        """All functions, callees first."""
        self._tiles(1, 1)
        self._tiles(1, _FEW_PANELS)
        self._tiles(2, 1)
        self._tiles(2, 1, fetches=False)
        self.emit_copy_rows()
        self._pad_weights()
        self._begin_with_bias()
        self._in_tiles()
        emit_round_rows(self)
        for rows in range(1, MOST_FEW + 1):
            FewTokens(self, rows).emit()
        self._entry()
        return self.t

    def _tiles(self, rows: int, panels: int, fetches: bool = True) -> None:
        """`tiles_rR_pP(a, w, wstride, wend, c, ldc, depth, goes_on)`: c (+)= a · w for R row tiles
        of as many tokens as the configuration says, and P panels, `wstride` bytes apart.

        `wend` holds the panels' weights of the last depth % 32; `goes_on` says whether sums start
        from c. `fetches`: asks for weights that follow while these are multiplied.
        """
        t, target = self.t, self.target
        places = [(r, p, v) for r in range(rows) for p in range(panels) for v in range(WIDE)]
        sums = dict(zip(places, SUMS[: len(places)], strict=True))
        with t.function(_tiles_name(rows, panels, fetches), _TILE_ARGS, private=True):
            stride = (t.mul("%ldc", t.constant(4)), "i64")
            row_tiles = ["%c", t.gep("%c", t.mul("%ldc", t.constant(MATRIX_ROWS)))]
            outputs = {
                register: t.gep(row_tiles[r], p * target.panel + v * MATRIX_ROWS)
                for (r, p, v), register in sums.items()
            }

            def load() -> list[str]:
                for register, place in outputs.items():
                    emit_unit(t, "tileloadd64", register, (place, "!llvm.ptr"), stride)
                return []

            def clear() -> list[str]:
                for register in outputs:
                    emit_unit(t, "tilezero", register)
                return []

            t.choose("%goes_on", load, clear, [])
            row_stride = (t.constant(self.row_bytes), "i64")
            weight_stride = (t.constant(4 * target.panel), "i64")

            def step(number: str, weights: list[str]) -> None:
                """32 k: tile `number` of the rows by the panels' weights."""
                a = t.gep("%a", t.mul(number, t.constant(TILE_ROW_BYTES)), "i8")
                for r in range(rows):
                    place = (t.gep(a, r * MATRIX_ROWS * self.row_bytes, "i8"), "!llvm.ptr")
                    emit_unit(t, "tileloadd64", TOKENS[r], place, row_stride)
                for p, v in dict.fromkeys((p, v) for _, p, v in places):
                    place = (t.gep(weights[p], v * TILE_ROW_BYTES, "i8"), "!llvm.ptr")
                    emit_unit(t, "tileloadd64", WEIGHTS[v], place, weight_stride)
                    for r in range(rows):
                        emit_unit(t, "tdpbf16ps", sums[r, p, v], TOKENS[r], WEIGHTS[v])

            streams = ["%w", t.gep("%w", "%wstride", "i8")][:panels]
            whole = t.binary("arith.divui", "%depth", t.constant(TILE_DEPTH))
            with t.loop(t.constant(0), whole, t.constant(1)) as k:
                offset = t.mul(k.index, t.constant(self.weight_bytes))
                weights = [t.gep(stream, offset, "i8") for stream in streams]
                for place in weights:
                    if rows == 1:  # memory is the limit; asked further ahead it gives less
                        prefetch(t, t.gep(place, self.weight_bytes // 2, "i8"), self.weight_bytes)
                    elif fetches:  # for the next panel
                        prefetch(t, t.gep(place, "%wstride", "i8"), self.weight_bytes)
                step(k.index, weights)
            with t.when(self._has_rest("%depth")):
                step(whole, [t.gep("%wend", p * self.weight_bytes, "i8") for p in range(panels)])
            for register, place in outputs.items():
                emit_unit(t, "tilestored64", register, (place, "!llvm.ptr"), stride)
            t.line("return")

    def _has_rest(self, depth: str) -> str:
        rest = self.t.op(f"arith.remui {depth}, {self.t.constant(TILE_DEPTH)} : i64")
        return self.t.compare("ne", rest, self.t.constant(0))

    def _pad_weights(self) -> None:
        """`pad_weights(w, to, depth)`: the weights of the last depth % 32, and zeros."""
        t, target = self.t, self.target
        with t.function("pad_weights", _PAD_ARGS, private=True):
            zero, one = t.constant(0), t.constant(1)
            pair_bytes = t.constant(4 * target.panel)
            pairs = ceil_div(t, "%depth", 2)
            whole = t.binary("arith.divui", "%depth", t.constant(TILE_DEPTH))
            first = t.mul(whole, t.constant(TILE_DEPTH // 2))
            rest = t.binary("arith.subi", pairs, first)

            def store(pair: str, value: str, v: int) -> None:
                place = t.gep(t.gep("%to", t.mul(pair, pair_bytes), "i8"), v * target.lanes)
                t.store(value, place, self.vector, TILE_ROW_BYTES)

            with t.loop(zero, rest, one) as pair:
                source = t.gep("%w", t.mul(t.add(first, pair.index), pair_bytes), "i8")
                for v in range(target.panel_vectors):
                    at = t.gep(source, v * target.lanes)
                    store(pair.index, t.load(at, self.vector, TILE_ROW_BYTES), v)
            with t.loop(rest, t.constant(TILE_DEPTH // 2), one) as pair:
                for v in range(target.panel_vectors):
                    store(pair.index, t.constant(0.0, self.vector), v)
            t.line("return")

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

    def _entry(self) -> None:
        """The kernel: chooses by token count who computes what."""
        t = self.t
        with t.function(linear_name(self.form), SIGNATURE):
            few = range(1, MOST_FEW + 1)
            t.switch("%tokens", {rows: partial(call_few_tokens, self, rows) for rows in few})
            with t.when(t.compare("ugt", "%tokens", t.constant(MOST_FEW))):
                t.call("in_tiles", [(f"%{name}", kind) for name, kind in SIGNATURE])
            t.line("return")

    def _in_tiles(self) -> None:
        """`in_tiles(…)`: blocks of tokens × K; the team shares (token block, panel) units."""
        t, target = self.t, self.target
        with t.function("in_tiles", SIGNATURE, private=True):
            zero, one, block = t.constant(0), t.constant(1), self.block()
            panel_size = self.panel_bytes()
            blocks = ceil_div(t, "%tokens", self.tile_rows * BLOCK_TILES)
            unit_low, unit_high = thread_share(t, t.mul(blocks, "%panels"), "%tid", "%team")
            packed = BLOCK_TILES * self.tile_rows * self.row_bytes
            whole, rest = (
                t.gep("%scratch", packed + number * CONFIG_BYTES, "i8")
                for number in range(len(_CONFIGS))
            )
            wend = t.gep(rest, CONFIG_BYTES, "i8")
            emit_configuration(t, whole, t.constant(self.tile_rows))
            with t.loop(zero, blocks, one) as b:
                # The part of this thread's unit range that lies in token block b.
                base = t.mul(b.index, "%panels")
                low = t.binary("arith.maxsi", t.binary("arith.subi", unit_low, base), zero)
                high = t.binary("arith.minsi", t.binary("arith.subi", unit_high, base), "%panels")
                row_low, row_high = thread_share(t, "%tokens", b.index, blocks)
                rows = t.binary("arith.subi", row_high, row_low)
                left = t.op(f"arith.remui {rows}, {t.constant(self.tile_rows)} : i64")
                left_low = t.binary("arith.subi", rows, left)
                emit_configuration(t, rest, left)
                mine = t.compare("slt", low, high)
                with t.loop(zero, t.select(mine, "%depth", zero, "i64"), block) as k:
                    depth = self.block_depth(k.index, block)
                    first = t.compare("eq", k.index, zero)
                    x = t.gep(t.gep("%x", t.mul(row_low, "%ldx")), k.index)
                    self.call_copy([x, "%ldx", "%scratch", rows, depth])
                    few = t.compare("ule", rows, t.constant(MATRIX_ROWS))
                    count = t.select(few, t.binary("arith.subi", high, low), zero, "i64")
                    odd = t.binary("arith.andi", count, one)
                    middle = t.add(low, t.binary("arith.subi", count, odd))

                    def panels(number: str, at_once: int) -> None:
                        """`at_once` panels from `number` on, for all rows of the block."""
                        start = t.gep("%w", t.mul(number, panel_size), "i8")
                        w = self.weights_at(start, k.index)
                        with t.when(self._has_rest(depth)):
                            for p in range(at_once):
                                source = t.gep(w, t.mul(panel_size, t.constant(p)), "i8")
                                to = t.gep(wend, p * self.weight_bytes, "i8")
                                self._call("pad_weights", [source, to, depth], _PAD_ARGS)
                        column = t.mul(number, t.constant(target.panel))
                        c = t.gep(t.gep("%out", t.mul(row_low, "%ldo")), column)
                        goes_on = self._begin(first, number, at_once, c, rows)

                        def tiles(count: int, row: str, fetches: bool = True) -> None:
                            place = t.mul(row, t.constant(self.row_bytes))
                            a = t.gep("%scratch", place, "i8")
                            out = t.gep(c, t.mul(row, "%ldo"))
                            values = [a, w, panel_size, wend, out, "%ldo", depth, goes_on]
                            self._call(_tiles_name(count, at_once, fetches), values, _TILE_ARGS)

                        if at_once > 1:
                            emit_unit(t, "ldtilecfg", (rest, "!llvm.ptr"))
                            tiles(1, zero)
                            return
                        with t.when(t.compare("ugt", left_low, zero)):
                            emit_unit(t, "ldtilecfg", (whole, "!llvm.ptr"))
                            tiles(2, zero)
                            next_tile = t.constant(self.tile_rows)
                            with t.loop(next_tile, left_low, next_tile) as row:
                                tiles(2, row.index, fetches=False)
                        with t.when(t.compare("ugt", left, zero)):
                            emit_unit(t, "ldtilecfg", (rest, "!llvm.ptr"))
                            two = t.compare("ugt", left, t.constant(MATRIX_ROWS))
                            with t.when(two):
                                tiles(2, left_low)
                            with t.when(t.binary("arith.xori", two, self._true(), "i1")):
                                tiles(1, left_low)

                    with t.loop(low, middle, t.constant(_FEW_PANELS)) as panel:
                        panels(panel.index, _FEW_PANELS)
                    with t.loop(middle, high, one) as panel:
                        panels(panel.index, 1)
            t.line('llvm.call_intrinsic "llvm.x86.tilerelease"() : () -> ()')
            t.line("return")

    def _begin(self, first: str, panel: str, count: int, c: str, rows: str) -> str:
        """Writes the bias to c where sums begin; returns whether they start from what c holds."""
        t = self.t
        none = t.is_null("%bias")
        clear = t.op(f"arith.andi {first}, {none} : i1")
        biased = t.op(f"arith.xori {first}, {clear} : i1")
        with t.when(biased):
            for p in range(count):
                bias = self.bias_at(t.add(panel, t.constant(p)))
                out = t.gep(c, p * self.target.panel)
                self._call("begin_with_bias", [bias, out, "%ldo", rows], _BIAS_ARGS)
        return t.binary("arith.xori", clear, self._true(), "i1")

    def _true(self) -> str:
        return self.t.constant(1, "i1")

    def _call(self, name: str, values: list[str], args: list[tuple[str, str]]) -> None:
        kinds = [kind for _, kind in args]
        self.t.call(name, list(zip(values, kinds, strict=True)))


def _tiles_name(rows: int, panels: int, fetches: bool) -> str:
    return f"tiles_r{rows}_p{panels}" + ("" if fetches else "_again")
