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
    TileShape,
    WeightFormat,
    activation_bytes,
    most_depth,
    panels_for,
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

#: Tiles of this many rows or more have time to fetch the next panel beside their own work.
PREFETCH_ROWS = 7


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
]
#: Of tiles that read one panel after another: what to fetch meanwhile, and bytes of it a unit.
_SHARED_ARGS = [*_TILE_ARGS, ("ahead", "!llvm.ptr"), ("pace", "i64")]
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
        shapes = {TileShape(rows, panels) for rows in sizes for panels in (1, self._group(rows))}
        for shape in sorted(shapes, key=lambda s: (s.rows, s.panels)):
            self._tile(shape)
        for rows in self._shared_sizes():
            self._tile(TileShape(rows, 1), shared=True)
        self.emit_copy_rows()
        for rows in sizes:
            self._few_tokens(rows)
        self._many_tokens()
        self._entry()
        return self.t

    def _group(self, rows: int) -> int:
        return panels_for(self.target, self.form, rows)

    def _shared_sizes(self) -> range:
        """Rows that a tile may have where tokens need more than one, dealt out evenly."""
        return range(max(1, self.tile_rows // 2), self.tile_rows + 1)

    def _tile(self, shape: TileShape, shared: bool = False) -> None:
        """`tile(a, w, wstride, c, ldc, depth, bias, scales, first, last)`: c[rows][panels·panel]
        (+)= a · w.

        A tile that is alone with its panel fetches the next one meanwhile. `shared` ones, which
        have `ahead` and `pace` too, fetch a part of it each: all at once it would come no faster
        and keep the tile from its own panel in L2.

        Rows of `a` are `row_bytes` apart, panels of `w` and their `scales` `wstride` bytes; `first`
        says whether chains begin or go on from what c holds, `last` whether they end here.
        """
        t, target, form = self.t, self.target, self.form
        lanes, vector = target.lanes, self.vector
        align = lanes * 4
        unit_bytes = form.unit_bytes(target.panel)
        unit_inputs = activation_bytes(self.activation, form.unit)
        places = shape.places(target)
        arguments = _SHARED_ARGS if shared else _TILE_ARGS
        with t.function(_tile_name(shape, shared), arguments, private=True):
            zero, one = t.constant(0), t.constant(1)
            rows, panels = ["%c"], ["%w"]
            for _ in range(1, shape.rows):
                rows.append(t.gep(rows[-1], "%ldc"))
            for _ in range(1, shape.panels):
                panels.append(t.gep(panels[-1], "%wstride", "i8"))
            outputs = [t.gep(rows[r], p * target.panel + v * lanes) for r, p, v in places]
            if shape.rows >= PREFETCH_ROWS and shape.panels == 1:
                # Outputs of many tokens are in no near cache when the tile ends (1 to 2 % of it).
                for output in outputs:
                    t.prefetch(output, nearest=True, write=True)
            start = self._start(shape, outputs)

            def steps(number: str, accumulators: list[str], count: int) -> list[str]:
                """`count` units of every chain, from unit `number` on."""
                offset = t.mul(number, t.constant(unit_bytes))
                inputs = t.gep("%a", t.mul(number, t.constant(unit_inputs)), "i8")
                bases = [t.gep(panel, offset, "i8") for panel in panels]
                if shared:
                    self.prefetch(
                        t.gep("%ahead", t.mul(number, "%pace"), "i8"), count * unit_bytes // 2
                    )
                elif shape.rows >= PREFETCH_ROWS and shape.panels == 1:
                    self.prefetch(t.gep(bases[0], "%wstride", "i8"), count * unit_bytes)
                for step in range(count):
                    accumulators = form.emit_unit(
                        t,
                        target,
                        shape,
                        [t.gep(b, step * unit_bytes, "i8") for b in bases],
                        t.gep(inputs, step * unit_inputs, "i8"),
                        accumulators,
                    )
                return accumulators

            units = ceil_div(t, "%depth", form.unit)
            unroll = max(1, 8 // (shape.rows * form.unit))
            rest = t.op(f"arith.remui {units}, {t.constant(unroll)} : i64")
            whole = t.binary("arith.subi", units, rest)
            with t.loop(zero, whole, t.constant(unroll), [(s, vector) for s in start]) as main:
                main.next = steps(main.index, main.carried, unroll)
            results = main.results
            if unroll > 1:
                with t.loop(whole, units, one, [(r, vector) for r in results]) as tail:
                    tail.next = steps(tail.index, tail.carried, 1)
                results = tail.results
            if form.scaled:
                unscaled = results
                results = t.choose(
                    "%last",
                    lambda: self._scaled(shape, unscaled),
                    lambda: unscaled,
                    [vector] * len(places),
                )
            for result, out in zip(results, outputs, strict=True):
                t.store(result, out, vector, align)
            t.line("return")

    def _start(self, shape: TileShape, outputs: list[str]) -> list[str]:
        """What the chains of a tile go on from: the bias, zero, or the outputs so far."""
        t, vector = self.t, self.vector
        places = shape.places(self.target)

        def begin() -> list[str]:
            if self.form.scaled:
                return [t.constant(0.0, vector)] * len(places)
            starts = self._bias_or_zero(shape)
            return [starts[p, v] for _, p, v in places]

        def so_far() -> list[str]:
            return [t.load(out, vector, self.target.lanes * 4) for out in outputs]

        return t.choose("%first", begin, so_far, [vector] * len(places))

    def _bias_or_zero(self, shape: TileShape) -> dict[tuple[int, int], str]:
        """The bias of each (panel, vector)."""
        t, target, vector = self.t, self.target, self.vector
        columns = self._columns(shape)

        def bias() -> list[str]:
            at = [t.gep("%bias", p * target.panel + v * target.lanes) for p, v in columns]
            return [t.load(place, vector, target.lanes * 4) for place in at]

        def nothing() -> list[str]:
            return [t.constant(0.0, vector)] * len(columns)

        chosen = t.choose(t.is_null("%bias"), nothing, bias, [vector] * len(columns))
        return dict(zip(columns, chosen, strict=True))

    def _scaled(self, shape: TileShape, chains: list[str]) -> list[str]:
        """chain · scale + bias of every accumulator."""
        t, target, vector = self.t, self.target, self.vector
        bias = self._bias_or_zero(shape)
        scales, panel = {}, "%scales"
        for p, v in self._columns(shape):
            if p and not v:
                panel = t.gep(panel, "%wstride", "i8")
            scales[p, v] = t.load(t.gep(panel, v * target.lanes), vector, target.lanes * 4)
        return [
            t.fma(chain, scales[p, v], bias[p, v], vector)
            for chain, (_, p, v) in zip(chains, shape.places(target), strict=True)
        ]

    def _columns(self, shape: TileShape) -> list[tuple[int, int]]:
        return [(p, v) for p in range(shape.panels) for v in range(self.target.panel_vectors)]

    def _few_tokens(self, rows: int) -> None:
        """`few_tokens_R(…)`: one tile of R tokens, packed `[K block][R][row_bytes]` in %a, over
        panels low … high; each panel group runs through all of K while its outputs stay in L1."""
        t = self.t
        with t.function(f"few_tokens_{rows}", _RANGE_ARGS, private=True):
            zero, one, block = t.constant(0), t.constant(1), self.block()
            panel_size = self.panel_bytes()

            def tile(shape: TileShape, panel: str) -> None:
                scales = t.gep("%w", t.mul(panel, panel_size), "i8")
                c = t.gep("%out", t.mul(panel, t.constant(self.target.panel)))
                bias = self.bias_at(panel)
                with t.loop(zero, "%depth", block) as k:
                    depth = self.block_depth(k.index, block)
                    number = t.binary("arith.divui", k.index, block)
                    a = t.gep("%a", t.mul(number, t.constant(rows * self.row_bytes)), "i8")
                    wk = self.weights_at(scales, k.index)
                    ends = self.ends(k.index, depth)
                    self._call_tile(
                        shape, [a, wk, panel_size, c, "%ldo", depth, bias, scales, *ends]
                    )

            group, low = self._group(rows), "%low"
            if group > 1:
                count = t.binary("arith.subi", "%high", "%low")
                rest = t.op(f"arith.remui {count}, {t.constant(group)} : i64")
                low = t.binary("arith.subi", "%high", rest)
                with t.loop("%low", low, t.constant(group)) as panel:
                    tile(TileShape(rows, group), panel.index)
            with t.loop(low, "%high", one) as panel:
                tile(TileShape(rows, 1), panel.index)
            t.line("return")

    def _many_tokens(self) -> None:
        """`many_tokens(…)`: blocks of tokens × K; the team shares (token block, panel) units."""
        t, target = self.t, self.target
        args = [*SIGNATURE[:9], ("low", "i64"), ("high", "i64"), ("scratch", "!llvm.ptr")]
        with t.function("many_tokens", args, private=True):
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
                tiles = ceil_div(t, rows, self.tile_rows)
                mine = t.compare("slt", low, high)
                with t.loop(zero, t.select(mine, "%depth", zero, "i64"), block) as k:
                    depth = self.block_depth(k.index, block)
                    ends = self.ends(k.index, depth)
                    x = t.gep(t.gep("%x", t.mul(row_low, "%ldx")), k.index)
                    self.call_copy([x, "%ldx", "%scratch", rows, depth])
                    with t.loop(low, high, one) as panel:
                        scales = t.gep("%w", t.mul(panel.index, panel_size), "i8")
                        w = self.weights_at(scales, k.index)
                        column = t.mul(panel.index, t.constant(target.panel))
                        bias = self.bias_at(panel.index)
                        units = ceil_div(t, depth, self.form.unit)
                        pace = t.binary(
                            "arith.ceildivui", t.constant(self.form.unit_bytes(target.panel)), tiles
                        )
                        part = t.mul(units, pace)
                        with t.loop(zero, tiles, one) as tile:
                            start, end = thread_share(t, rows, tile.index, tiles)
                            a = t.gep("%scratch", t.mul(start, t.constant(self.row_bytes)), "i8")
                            row = t.add(row_low, start)
                            c = t.gep(t.gep("%out", t.mul(row, "%ldo")), column)
                            call = [a, w, panel_size, c, "%ldo", depth, bias, scales, *ends]
                            ahead = t.gep(w, t.add(panel_size, t.mul(tile.index, part)), "i8")
                            call += [ahead, pace]
                            t.switch(
                                t.binary("arith.subi", end, start),
                                {
                                    size: partial(self._call_tile, TileShape(size, 1), call, True)
                                    for size in self._shared_sizes()
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

    def _call_tile(self, shape: TileShape, values: list[str], shared: bool = False) -> None:
        kinds = [kind for _, kind in (_SHARED_ARGS if shared else _TILE_ARGS)]
        self.t.call(_tile_name(shape, shared), list(zip(values, kinds, strict=True)))


def _tile_name(shape: TileShape, shared: bool) -> str:
    return f"tile_r{shape.rows}_p{shape.panels}" + "_shared" * shared
