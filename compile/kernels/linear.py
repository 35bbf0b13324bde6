"""The linear kernel: out = x · Wᵀ + bias on packed weights, for any number of tokens.

Weights lie in panels of `Target.panel` outputs side by side over all of K, in a weight format (see
`formats`), so that one token streams them once and many tokens reuse a panel from cache. Every
output is one chain of multiply-adds over k = 0, 1, …, K-1, started from the bias (from zero where
the format has a scale for each output: chain · scale + bias is the last step): tiles, cache blocks
and threads only decide who computes which chain, so results are bit-identical for any token count
and team.
"""

from functools import partial

from buddy_pipeline.compile.formats.base import (
    WeightFormat,
    activation_bytes,
    most_depth,
    places,
    prefetch,
    row_bytes,
    tile_rows,
)
from buddy_pipeline.compile.kernels.linear_parts import (
    BLOCK_TILES,
    SIGNATURE,
    LinearParts,
    ceil_div,
    linear_name,
)
from buddy_pipeline.compile.kernels.matrix_linear import MatrixLinear, matrix_scratch_bytes
from buddy_pipeline.compile.kernels.step import thread_share
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Tiles that multiply each weight so often have time to fetch the next panel beside their own work.
PREFETCH_PRODUCTS = 7


def linear_scratch_bytes(target: Target, form: WeightFormat, depth: int) -> int:
    """Bytes of scratch per thread that the kernel needs for K = `depth`."""
    blocks = -(-depth // most_depth(target, form, form.activation(target)))
    rows = max(BLOCK_TILES, blocks) * tile_rows(target, form)
    each = row_bytes(target, form.activation(target))
    if form.registers(target).matrix:
        return matrix_scratch_bytes(target, BLOCK_TILES * tile_rows(target, form), each)
    return rows * each


def emit_linear(target: Target, form: WeightFormat) -> str:
    """MLIR text of the module that holds the kernel of a weight format."""
    emitter = MatrixLinear if form.registers(target).matrix else _Linear
    return str(emitter(target, form).emit())


_TILE_ARGS = [
    ("a", "!llvm.ptr"),
    ("w", "!llvm.ptr"),
    ("wstride", "i64"),
    ("c", "!llvm.ptr"),
    ("ldc", "i64"),
    ("depth", "i64"),
    ("bias", "!llvm.ptr"),
    ("scales", "!llvm.ptr"),
    ("first", "i1"),
    ("last", "i1"),
    ("ahead", "!llvm.ptr"),
    ("pace", "i64"),
]
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


class _Linear(LinearParts):
    """Writes the functions of the kernel that works in registers."""

    def __init__(self, target: Target, form: WeightFormat) -> None:
        super().__init__(target, form, row_unit=form.unit)

    def emit(self) -> Text:
        """All functions, callees first."""
        sizes = range(1, self.tile_rows + 1)
        for rows in sizes:
            self._tile(rows)
        self.emit_copy_rows()
        for rows in sizes:
            self._few_tokens(rows)
        self._many_tokens()
        self._entry()
        return self.t

    def _tile(self, rows: int) -> None:
        """`tile_R(a, w, wstride, c, ldc, depth, bias, scales, first, last, ahead, pace)`:
        c[R][panel] (+)= a · w, for R = `rows` tokens.

        Rows of `a` are `row_bytes` apart; `first` says whether chains begin or go on from what c
        holds, `last` whether they end here. Large tiles fetch what lies at `ahead`, `pace` bytes
        for each unit; if it is null, the next panel, `wstride` bytes from `w`.
        """
        t, target, form = self.t, self.target, self.form
        lanes, vector = target.lanes, self.vector
        align = lanes * 4
        unit_bytes = form.unit_bytes(target.panel)
        unit_inputs = activation_bytes(self.activation, form.unit)
        with t.function(_tile_name(rows), _TILE_ARGS, private=True):
            zero, one = t.constant(0), t.constant(1)
            lines = ["%c"]
            for _ in range(1, rows):
                lines.append(t.gep(lines[-1], "%ldc"))
            outputs = [t.gep(lines[r], v * lanes) for r, v in places(target, rows)]
            fetches = rows * max(1, form.registers(target).temporaries) >= PREFETCH_PRODUCTS
            if fetches:
                # Outputs of many tokens are in no near cache when the tile ends (1 to 2 % of it).
                for output in outputs:
                    t.prefetch(output, nearest=True, write=True)
            start = self._start(rows, outputs)
            units = ceil_div(t, "%depth", form.unit)
            unroll = max(1, 8 // (rows * form.unit))
            rest = t.op(f"arith.remui {units}, {t.constant(unroll)} : i64")
            whole = t.binary("arith.subi", units, rest)
            kinds = [vector] * len(outputs)

            def steps(number: str, accumulators: list[str], count: int, fetched: int) -> list[str]:
                """`count` units of every chain, from unit `number` on, with `fetched` bytes of what
                comes later for each."""
                offset = t.mul(number, t.constant(unit_bytes))
                inputs = t.gep("%a", t.mul(number, t.constant(unit_inputs)), "i8")
                base = t.gep("%w", offset, "i8")
                if fetched == unit_bytes:
                    prefetch(t, t.gep(base, "%wstride", "i8"), count * fetched)
                elif fetched:
                    place = t.gep("%ahead", t.mul(number, "%pace"), "i8")
                    prefetch(t, place, count * fetched)
                for step in range(count):
                    accumulators = form.emit_unit(
                        t,
                        target,
                        rows,
                        t.gep(base, step * unit_bytes, "i8"),
                        t.gep(inputs, step * unit_inputs, "i8"),
                        accumulators,
                    )
                return accumulators

            def chains(fetched: int) -> list[str]:
                begun = [*zip(start, kinds, strict=True)]
                with t.loop(zero, whole, t.constant(unroll), begun) as main:
                    main.next = steps(main.index, main.carried, unroll, fetched)
                results = main.results
                if unroll > 1:
                    begun = [*zip(results, kinds, strict=True)]
                    with t.loop(whole, units, one, begun) as tail:
                        tail.next = steps(tail.index, tail.carried, 1, fetched)
                    results = tail.results
                return results

            if fetches:
                # A panel's only tile fetches the next panel. Of several each fetches a part, at
                # most half: all of it during the first would be a burst that holds up the tile
                # itself (75 and 83 % of the peak, f32 weights from memory).
                alone = t.is_null("%ahead")
                half = unit_bytes // 2
                results = t.choose(alone, lambda: chains(unit_bytes), lambda: chains(half), kinds)
            else:
                results = chains(0)
            if form.scaled:
                unscaled = results
                results = t.choose(
                    "%last",
                    lambda: self._scaled(rows, unscaled),
                    lambda: unscaled,
                    kinds,
                )
            for result, out in zip(results, outputs, strict=True):
                t.store(result, out, vector, align)
            t.line("return")

    def _start(self, rows: int, outputs: list[str]) -> list[str]:
        """What the chains of a tile go on from: the bias, zero, or the outputs so far."""
        t, vector = self.t, self.vector

        def begin() -> list[str]:
            starts = [t.constant(0.0, vector)] * self.target.panel_vectors
            if not self.form.scaled:
                starts = self._bias_or_zero()
            return starts * rows

        def so_far() -> list[str]:
            return [t.load(out, vector, self.target.lanes * 4) for out in outputs]

        return t.choose("%first", begin, so_far, [vector] * len(outputs))

    def _bias_or_zero(self) -> list[str]:
        """The bias of each vector of the panel."""
        t, count = self.t, self.target.panel_vectors

        def nothing() -> list[str]:
            return [t.constant(0.0, self.vector)] * count

        def bias() -> list[str]:
            return self._panel_vectors("%bias")

        return t.choose(t.is_null("%bias"), nothing, bias, [self.vector] * count)

    def _scaled(self, rows: int, chains: list[str]) -> list[str]:
        """chain · scale + bias of every accumulator."""
        bias, scales = self._bias_or_zero(), self._panel_vectors("%scales")
        return [
            self.t.fma(chain, scales[v], bias[v], self.vector)
            for chain, (_, v) in zip(chains, places(self.target, rows), strict=True)
        ]

    def _panel_vectors(self, first: str) -> list[str]:
        """An f32 of each output of the panel."""
        t, lanes = self.t, self.target.lanes
        return [
            t.load(t.gep(first, v * lanes), self.vector, lanes * 4)
            for v in range(self.target.panel_vectors)
        ]

    def _few_tokens(self, rows: int) -> None:
        """`few_tokens_R(…)`: one tile of R tokens, packed `[K block][R][row_bytes]` in %a, over
        panels low … high. Each runs through all of K while its outputs stay in L1.

        One stream of weights: tiles of several panels read 83 to 92 % of what this reads (f32 and
        bf16, Zen 4), and half of it with some GGUF formats.
        """
        t = self.t
        with t.function(f"few_tokens_{rows}", _RANGE_ARGS, private=True):
            zero, one, block = t.constant(0), t.constant(1), self.block()
            panel_size = self.panel_bytes()
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
                    ahead = [t.op("llvm.mlir.zero : !llvm.ptr"), zero]
                    self._call_tile(
                        rows, [a, wk, panel_size, c, "%ldo", depth, bias, scales, *ends, *ahead]
                    )
            t.line("return")

    def _many_tokens(self) -> None:
        """`many_tokens(…)`: blocks of tokens × K; the team shares (token block, panel) units."""
        t, target = self.t, self.target
        args = [*SIGNATURE[:9], ("low", "i64"), ("high", "i64"), ("scratch", "!llvm.ptr")]
        with t.function("many_tokens", args, private=True):
            zero, one, block = t.constant(0), t.constant(1), self.block()
            panel_size = self.panel_bytes()
            unit = t.constant(self.form.unit_bytes(target.panel))
            blocks = ceil_div(t, "%tokens", self.tile_rows * BLOCK_TILES)
            with t.loop(zero, blocks, one) as b:
                # The part of this thread's unit range that lies in token block b.
                base = t.mul(b.index, "%panels")
                low = t.binary("arith.maxsi", t.binary("arith.subi", "%low", base), zero)
                high = t.binary("arith.minsi", t.binary("arith.subi", "%high", base), "%panels")
                row_low, row_high = thread_share(t, "%tokens", b.index, blocks)
                rows = t.binary("arith.subi", row_high, row_low)
                tiles = ceil_div(t, rows, self.tile_rows)
                pace = t.binary("arith.ceildivui", unit, tiles)
                mine = t.compare("slt", low, high)
                with t.loop(zero, t.select(mine, "%depth", zero, "i64"), block) as k:
                    depth = self.block_depth(k.index, block)
                    ends = self.ends(k.index, depth)
                    units = ceil_div(t, depth, self.form.unit)
                    x = t.gep(t.gep("%x", t.mul(row_low, "%ldx")), k.index)
                    self.call_copy([x, "%ldx", "%scratch", rows, depth])
                    with t.loop(low, high, one) as panel:
                        scales = t.gep("%w", t.mul(panel.index, panel_size), "i8")
                        w = self.weights_at(scales, k.index)
                        column = t.mul(panel.index, t.constant(target.panel))
                        bias = self.bias_at(panel.index)
                        with t.loop(zero, tiles, one) as tile:
                            start, end = thread_share(t, rows, tile.index, tiles)
                            a = t.gep("%scratch", t.mul(start, t.constant(self.row_bytes)), "i8")
                            row = t.add(row_low, start)
                            c = t.gep(t.gep("%out", t.mul(row, "%ldo")), column)
                            part = t.mul(t.mul(units, tile.index), pace)
                            ahead = [t.gep(t.gep(w, panel_size, "i8"), part, "i8"), pace]
                            call = [a, w, panel_size, c, "%ldo", depth, bias, scales, *ends, *ahead]
                            t.switch(
                                t.binary("arith.subi", end, start),
                                {
                                    size: partial(self._call_tile, size, call)
                                    for size in range(1, self.tile_rows + 1)
                                },
                            )
            t.line("return")

    def _entry(self) -> None:
        """The kernel: chooses by token count who computes what."""
        t, most = self.t, self.tile_rows
        with t.function(linear_name(self.form), SIGNATURE):
            zero, block = t.constant(0), self.block()
            low, high = thread_share(t, "%panels", "%tid", "%team")

            def few(rows: int) -> None:
                with t.loop(zero, "%depth", block) as k:
                    depth = self.block_depth(k.index, block)
                    number = t.binary("arith.divui", k.index, block)
                    to = t.gep("%scratch", t.mul(number, t.constant(rows * self.row_bytes)), "i8")
                    self.call_copy([t.gep("%x", k.index), "%ldx", to, "%tokens", depth])
                values = ["%scratch", "%out", "%ldo", "%w", "%bias", "%depth", low, high]
                kinds = [kind for _, kind in _RANGE_ARGS]
                t.call(f"few_tokens_{rows}", list(zip(values, kinds, strict=True)))

            t.switch("%tokens", {rows: partial(few, rows) for rows in range(1, most + 1)})
            with t.when(t.compare("ugt", "%tokens", t.constant(most))):
                units = t.mul(ceil_div(t, "%tokens", most * BLOCK_TILES), "%panels")
                first, last = thread_share(t, units, "%tid", "%team")
                call = [(f"%{name}", kind) for name, kind in SIGNATURE[:9]]
                call += [(first, "i64"), (last, "i64"), ("%scratch", "!llvm.ptr")]
                t.call("many_tokens", call)
            t.line("return")

    def _call_tile(self, rows: int, values: list[str]) -> None:
        kinds = [kind for _, kind in _TILE_ARGS]
        self.t.call(_tile_name(rows), list(zip(values, kinds, strict=True)))


def _tile_name(rows: int) -> str:
    return f"tile_{rows}"
