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
    depth_step,
    head_bytes,
    most_depth,
    panels_for,
    row_bytes,
    tile_rows,
)
from buddy_pipeline.compile.kernels.step import thread_share
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Register tiles in one block of tokens; the packed block fills a fraction of L2.
BLOCK_TILES = 9

#: Tiles of this many rows or more have time to fetch the next panel beside their own work.
PREFETCH_ROWS = 7
CACHE_LINE = 64

#: Argument names and types of the kernel: activations and their row stride (elements), output and
#: its row stride, packed weights, bias or null, sizes, thread id and team size, thread scratch.
SIGNATURE = [
    ("x", "!llvm.ptr"),
    ("ldx", "i64"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("w", "!llvm.ptr"),
    ("bias", "!llvm.ptr"),
    ("tokens", "i64"),
    ("depth", "i64"),
    ("panels", "i64"),
    ("tid", "i64"),
    ("team", "i64"),
    ("scratch", "!llvm.ptr"),
]


def linear_name(form: WeightFormat) -> str:
    """The kernel's symbol."""
    return f"bp_linear_{form.name}"


def linear_scratch_bytes(target: Target, form: WeightFormat, depth: int) -> int:
    """Bytes of scratch per thread that the kernel needs for K = `depth`."""
    blocks = -(-depth // most_depth(form, form.activation(target)))
    rows = max(BLOCK_TILES, blocks) * tile_rows(target, form)
    return rows * row_bytes(form.activation(target))


def emit_linear(target: Target, form: WeightFormat) -> str:
    """MLIR text of the module that holds the kernel of a weight format."""
    return str(_Linear(target, form).emit())


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


class _Linear:
    """Writes the functions of one kernel."""

    def __init__(self, target: Target, form: WeightFormat) -> None:
        self.t = Text()
        self.target = target
        self.form = form
        self.activation = form.activation(target)
        self.row_bytes = row_bytes(self.activation)
        self.tile_rows = tile_rows(target, form)
        self.vector = f"vector<{target.lanes}xf32>"

    def emit(self) -> Text:
        """All functions, callees first."""
        sizes = range(1, self.tile_rows + 1)
        shapes = {TileShape(rows, panels) for rows in sizes for panels in (1, self._group(rows))}
        for shape in sorted(shapes, key=lambda s: (s.rows, s.panels)):
            self._tile(shape)
        self._copy_rows()
        for rows in sizes:
            self._few_tokens(rows)
        self._many_tokens()
        self._entry()
        return self.t

    def _group(self, rows: int) -> int:
        return panels_for(self.target, self.form, rows)

    def _tile(self, shape: TileShape) -> None:
        """`tile(a, w, wstride, c, ldc, depth, bias, scales, first, last)`: c[rows][panels·panel]
        (+)= a · w.

        Rows of `a` are `row_bytes` apart, panels of `w` and their `scales` `wstride` bytes; `first`
        says whether chains begin or go on from what c holds, `last` whether they end here.
        """
        t, target, form = self.t, self.target, self.form
        lanes, vector = target.lanes, self.vector
        align = lanes * 4
        unit_bytes = form.unit_bytes(target.panel)
        unit_inputs = activation_bytes(self.activation, form.unit)
        places = shape.places(target)
        with t.function(_tile_name(shape), _TILE_ARGS, private=True):
            zero, one = t.constant(0), t.constant(1)
            rows, panels = ["%c"], ["%w"]
            for _ in range(1, shape.rows):
                rows.append(t.gep(rows[-1], "%ldc"))
            for _ in range(1, shape.panels):
                panels.append(t.gep(panels[-1], "%wstride", "i8"))
            outputs = [t.gep(rows[r], p * target.panel + v * lanes) for r, p, v in places]
            start = self._start(shape, outputs)

            def steps(number: str, accumulators: list[str], count: int) -> list[str]:
                """`count` units of every chain, from unit `number` on."""
                offset = t.mul(number, t.constant(unit_bytes))
                inputs = t.gep("%a", t.mul(number, t.constant(unit_inputs)), "i8")
                bases = [t.gep(panel, offset, "i8") for panel in panels]
                if shape.rows >= PREFETCH_ROWS and shape.panels == 1:
                    self._prefetch(t.gep(bases[0], "%wstride", "i8"), count * unit_bytes)
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

            units = _ceil_div(t, "%depth", form.unit)
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

    def _prefetch(self, address: str, size: int) -> None:
        """Asks for `size` bytes of the next panel: while a panel's tiles after the first multiply
        from cache, memory would otherwise idle."""
        for line in range(0, size, CACHE_LINE):
            place = self.t.gep(address, line, "i8")
            self.t.line(
                f'"llvm.intr.prefetch"({place}) <{{cache = 1 : i32, hint = 2 : i32, rw = 0 : i32}}>'
                " : (!llvm.ptr) -> ()"
            )

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

    def _copy_rows(self) -> None:
        """`copy_rows(x, ldx, to, rows, depth)`: rows of x as tiles read them, `row_bytes` apart.

        Rows are packed in the format's kind of activation, and end in zeros up to a whole unit.
        """
        t = self.t
        with t.function("copy_rows", _COPY_ARGS, private=True):
            end = t.mul(_ceil_div(t, "%depth", self.form.unit), t.constant(self.form.unit))
            with t.loop(t.constant(0), "%rows", t.constant(1)) as row:
                source = t.gep("%x", t.mul(row.index, "%ldx"))
                to = t.gep("%to", t.mul(row.index, t.constant(self.row_bytes)), "i8")
                self.activation.emit_row(t, self.target, source, to, "%depth", end)
            t.line("return")

    def _few_tokens(self, rows: int) -> None:
        """`few_tokens_R(…)`: one tile of R tokens, packed `[K block][R][row_bytes]` in %a, over
        panels low … high; each panel group runs through all of K while its outputs stay in L1."""
        t = self.t
        with t.function(f"few_tokens_{rows}", _RANGE_ARGS, private=True):
            zero, one, block = t.constant(0), t.constant(1), self._block()
            panel_size = self._panel_bytes()

            def tile(shape: TileShape, panel: str) -> None:
                scales = t.gep("%w", t.mul(panel, panel_size), "i8")
                c = t.gep("%out", t.mul(panel, t.constant(self.target.panel)))
                bias = self._bias_at(panel)
                with t.loop(zero, "%depth", block) as k:
                    depth = self._block_depth(k.index, block)
                    number = t.binary("arith.divui", k.index, block)
                    a = t.gep("%a", t.mul(number, t.constant(rows * self.row_bytes)), "i8")
                    wk = self._weights_at(scales, k.index)
                    ends = self._ends(k.index, depth)
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
            zero, one, block = t.constant(0), t.constant(1), self._block()
            panel_size = self._panel_bytes()
            blocks = _ceil_div(t, "%tokens", self.tile_rows * BLOCK_TILES)
            with t.loop(zero, blocks, one) as b:
                # The part of this thread's unit range that lies in token block b.
                base = t.mul(b.index, "%panels")
                low = t.binary("arith.maxsi", t.binary("arith.subi", "%low", base), zero)
                high = t.binary("arith.minsi", t.binary("arith.subi", "%high", base), "%panels")
                row_low, row_high = thread_share(t, "%tokens", b.index, blocks)
                rows = t.binary("arith.subi", row_high, row_low)
                tiles = _ceil_div(t, rows, self.tile_rows)
                mine = t.compare("slt", low, high)
                with t.loop(zero, t.select(mine, "%depth", zero, "i64"), block) as k:
                    depth = self._block_depth(k.index, block)
                    ends = self._ends(k.index, depth)
                    x = t.gep(t.gep("%x", t.mul(row_low, "%ldx")), k.index)
                    self._call_copy([x, "%ldx", "%scratch", rows, depth])
                    with t.loop(low, high, one) as panel:
                        scales = t.gep("%w", t.mul(panel.index, panel_size), "i8")
                        w = self._weights_at(scales, k.index)
                        column = t.mul(panel.index, t.constant(target.panel))
                        bias = self._bias_at(panel.index)
                        with t.loop(zero, tiles, one) as tile:
                            start, end = thread_share(t, rows, tile.index, tiles)
                            a = t.gep("%scratch", t.mul(start, t.constant(self.row_bytes)), "i8")
                            row = t.add(row_low, start)
                            c = t.gep(t.gep("%out", t.mul(row, "%ldo")), column)
                            call = [a, w, panel_size, c, "%ldo", depth, bias, scales, *ends]
                            t.switch(
                                t.binary("arith.subi", end, start),
                                {
                                    size: partial(self._call_tile, TileShape(size, 1), call)
                                    for size in range(1, self.tile_rows + 1)
                                },
                            )
            t.line("return")

    def _entry(self) -> None:
        """The kernel: chooses by token count who computes what."""
        t, most = self.t, self.tile_rows
        with t.function(linear_name(self.form), SIGNATURE):
            zero, block = t.constant(0), self._block()
            low, high = thread_share(t, "%panels", "%tid", "%team")

            def few(rows: int) -> None:
                with t.loop(zero, "%depth", block) as k:
                    depth = self._block_depth(k.index, block)
                    number = t.binary("arith.divui", k.index, block)
                    to = t.gep("%scratch", t.mul(number, t.constant(rows * self.row_bytes)), "i8")
                    self._call_copy([t.gep("%x", k.index), "%ldx", to, "%tokens", depth])
                values = ["%scratch", "%out", "%ldo", "%w", "%bias", "%depth", low, high]
                kinds = [kind for _, kind in _RANGE_ARGS]
                t.call(f"few_tokens_{rows}", list(zip(values, kinds, strict=True)))

            t.switch("%tokens", {rows: partial(few, rows) for rows in range(1, most + 1)})
            with t.when(t.compare("ugt", "%tokens", t.constant(most))):
                units = t.mul(_ceil_div(t, "%tokens", most * BLOCK_TILES), "%panels")
                first, last = thread_share(t, units, "%tid", "%team")
                call = [(f"%{name}", kind) for name, kind in SIGNATURE[:9]]
                call += [(first, "i64"), (last, "i64"), ("%scratch", "!llvm.ptr")]
                t.call("many_tokens", call)
            t.line("return")

    def _panel_bytes(self) -> str:
        """Bytes of one panel of this matrix."""
        t, form, panel = self.t, self.form, self.target.panel
        units = _ceil_div(t, "%depth", form.unit)
        size = t.mul(units, t.constant(form.unit_bytes(panel)))
        return t.add(size, t.constant(head_bytes(form, panel))) if form.scaled else size

    def _weights_at(self, panel: str, k: str) -> str:
        """Address of depth k (a multiple of the unit) in a panel."""
        number = self.t.binary("arith.divui", k, self.t.constant(self.form.unit))
        size = self.t.constant(self.form.unit_bytes(self.target.panel))
        first = self.t.gep(panel, head_bytes(self.form, self.target.panel), "i8")
        return self.t.gep(first, self.t.mul(number, size), "i8")

    def _ends(self, k: str, depth: str) -> tuple[str, str]:
        """Whether the block of `depth` at k is the first of K, and whether it is the last."""
        t = self.t
        first = t.compare("eq", k, t.constant(0))
        return first, t.compare("eq", t.add(k, depth), "%depth")

    def _block(self) -> str:
        """Depth of the cache blocks over K: as few as fit, of one size but for the last."""
        t = self.t
        most, step = most_depth(self.form, self.activation), depth_step(self.form, self.activation)
        count = _ceil_div(t, "%depth", most)
        even = t.binary("arith.ceildivui", "%depth", t.binary("arith.maxui", count, t.constant(1)))
        return t.mul(_ceil_div(t, even, step), t.constant(step))

    def _block_depth(self, k: str, block: str) -> str:
        """Depth of the K block that starts at k."""
        left = self.t.binary("arith.subi", "%depth", k)
        return self.t.binary("arith.minui", left, block)

    def _bias_at(self, panel: str) -> str:
        """Address of the bias of `panel`, or null when there is none."""
        t = self.t
        place = t.gep("%bias", t.mul(panel, t.constant(self.target.panel)))
        return t.select(t.is_null("%bias"), "%bias", place, "!llvm.ptr")

    def _call_tile(self, shape: TileShape, values: list[str]) -> None:
        kinds = [kind for _, kind in _TILE_ARGS]
        self.t.call(_tile_name(shape), list(zip(values, kinds, strict=True)))

    def _call_copy(self, values: list[str]) -> None:
        kinds = [kind for _, kind in _COPY_ARGS]
        self.t.call("copy_rows", list(zip(values, kinds, strict=True)))


def _tile_name(shape: TileShape) -> str:
    return f"tile_r{shape.rows}_p{shape.panels}"


def _ceil_div(t: Text, value: str, by: int) -> str:
    if by == 1:
        return value
    return t.binary("arith.divui", t.add(value, t.constant(by - 1)), t.constant(by))
