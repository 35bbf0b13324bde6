"""The linear kernel: out = x · Wᵀ + bias on packed weights, for any number of tokens.

Weights lie in panels of `Target.panel` outputs side by side over all of K, in a weight format (see
`formats`), so that one token streams them once and many tokens reuse a panel from cache. Every
output is one chain of multiply-adds over k = 0, 1, …, K-1, started from the bias: tiles, cache
blocks and threads only decide who computes which chain, so results are bit-identical for any token
count and team.
"""

from functools import partial

from buddy_pipeline.compile.formats.base import BLOCK_K, TileShape, WeightFormat, row_bytes
from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.step import thread_share
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Register tiles in one block of tokens; the packed block fills a fraction of L2.
BLOCK_TILES = 9

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
    blocks = -(-depth // BLOCK_K)
    rows = max(BLOCK_TILES, blocks) * target.tile_rows
    return rows * row_bytes(form.activation_bytes(target))


def panels_for(target: Target, rows: int) -> int:
    """Panels that a tile of `rows` tokens takes at once when tokens are few: enough independent
    chains to hide the latency of the multiply-add, and several streams from memory."""
    most = (target.registers - 1) // (target.panel_vectors * (rows + 1))
    return max(1, min(4, most))


def emit_linear(target: Target, form: WeightFormat) -> str:
    """MLIR text of the module that holds the kernel of a weight format."""
    return str(_Linear(target, form).emit())


_TILE_KINDS = ["!llvm.ptr", "!llvm.ptr", "i64", "!llvm.ptr", "i64", "i64", "!llvm.ptr", "i1"]
_TILE_ARGS = list(
    zip(["a", "w", "wstride", "c", "ldc", "depth", "bias", "first"], _TILE_KINDS, strict=True)
)
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
        self.activation = form.activation_bytes(target)
        self.row_bytes = row_bytes(self.activation)
        self.vector = f"vector<{target.lanes}xf32>"

    def emit(self) -> Text:
        """All functions, callees first."""
        sizes = range(1, self.target.tile_rows + 1)
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
        return panels_for(self.target, rows)

    def _tile(self, shape: TileShape) -> None:
        """`tile(a, w, wstride, c, ldc, depth, bias, first)`: c[rows][panels·panel] (+)= a · w.

        Rows of `a` are `row_bytes` apart, panels of `w` `wstride` bytes; `first` says whether
        chains start from the bias or go on from what c holds.
        """
        t, target, form = self.t, self.target, self.form
        lanes, vector = target.lanes, self.vector
        align = lanes * 4
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
                offset = t.mul(number, t.constant(form.unit_bytes(target.panel)))
                inputs = t.gep("%a", t.mul(number, t.constant(form.unit * self.activation)), "i8")
                bases = [t.gep(panel, offset, "i8") for panel in panels]
                for step in range(count):
                    accumulators = form.emit_unit(
                        t,
                        target,
                        shape,
                        [t.gep(b, step * form.unit_bytes(target.panel), "i8") for b in bases],
                        t.gep(inputs, step * form.unit * self.activation, "i8"),
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
            for result, out in zip(results, outputs, strict=True):
                t.store(result, out, vector, align)
            t.line("return")

    def _start(self, shape: TileShape, outputs: list[str]) -> list[str]:
        """What the chains of a tile go on from: the bias, zero, or the outputs so far."""
        t, target = self.t, self.target
        lanes, vector = target.lanes, self.vector
        places = shape.places(target)
        columns = [(p, v) for p in range(shape.panels) for v in range(target.panel_vectors)]

        def bias() -> list[str]:
            at = [t.gep("%bias", p * target.panel + v * lanes) for p, v in columns]
            return [t.load(place, vector, lanes * 4) for place in at]

        def nothing() -> list[str]:
            return [t.constant(0.0, vector)] * len(columns)

        def bias_or_zero() -> list[str]:
            starts = t.choose(t.is_null("%bias"), nothing, bias, [vector] * len(columns))
            by_column = dict(zip(columns, starts, strict=True))
            return [by_column[p, v] for _, p, v in places]

        def so_far() -> list[str]:
            return [t.load(out, vector, lanes * 4) for out in outputs]

        return t.choose("%first", bias_or_zero, so_far, [vector] * len(places))

    def _copy_rows(self) -> None:
        """`copy_rows(x, ldx, to, rows, depth)`: rows of x as tiles read them, `row_bytes` apart.

        Rows are rounded to bf16 for formats that multiply it, and end in zeros up to a whole unit.
        """
        t, lanes, vector = self.t, self.target.lanes, self.vector
        element = "bf16" if self.activation == 2 else "f32"
        with t.function("copy_rows", _COPY_ARGS, private=True):
            zero, one, width = t.constant(0), t.constant(1), t.constant(lanes)
            whole = t.binary("arith.subi", "%depth", t.op(f"arith.remui %depth, {width} : i64"))
            end = t.mul(_ceil_div(t, "%depth", self.form.unit), t.constant(self.form.unit))
            nothing = t.constant(0.0, element)

            with t.loop(zero, "%rows", one) as row:
                source = t.gep("%x", t.mul(row.index, "%ldx"))
                to = t.gep("%to", t.mul(row.index, t.constant(self.row_bytes)), "i8")
                narrow = f"vector<{lanes}x{element}>"
                with t.loop(zero, whole, width) as k:
                    value = t.load(t.gep(source, k.index), vector)
                    value = vm.narrowed(t, value, element, vm.Lanes(lanes), self.target)
                    t.store(value, t.gep(to, k.index, element), narrow, self.activation)
                with t.loop(whole, "%depth", one) as k:
                    value = t.load(t.gep(source, k.index), "f32")
                    value = vm.narrowed(t, value, element, vm.Lanes(0), self.target)
                    t.store(value, t.gep(to, k.index, element), element, self.activation)
                with t.loop("%depth", end, one) as k:
                    t.store(nothing, t.gep(to, k.index, element), element, self.activation)
            t.line("return")

    def _few_tokens(self, rows: int) -> None:
        """`few_tokens_R(…)`: one tile of R tokens, packed `[K block][R][row_bytes]` in %a, over
        panels low … high; each panel group runs through all of K while its outputs stay in L1."""
        t = self.t
        with t.function(f"few_tokens_{rows}", _RANGE_ARGS, private=True):
            zero, one, block = t.constant(0), t.constant(1), t.constant(BLOCK_K)
            panel_size = self._panel_bytes()

            def tile(shape: TileShape, panel: str) -> None:
                w = t.gep("%w", t.mul(panel, panel_size), "i8")
                c = t.gep("%out", t.mul(panel, t.constant(self.target.panel)))
                bias = self._bias_at(panel)
                with t.loop(zero, "%depth", block) as k:
                    depth = self._block_depth(k.index)
                    number = t.binary("arith.divui", k.index, block)
                    a = t.gep("%a", t.mul(number, t.constant(rows * self.row_bytes)), "i8")
                    wk = self._weights_at(w, k.index)
                    first = t.compare("eq", k.index, zero)
                    self._call_tile(shape, [a, wk, panel_size, c, "%ldo", depth, bias, first])

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
            zero, one, block = t.constant(0), t.constant(1), t.constant(BLOCK_K)
            panel_size = self._panel_bytes()
            blocks = _ceil_div(t, "%tokens", target.tile_rows * BLOCK_TILES)
            with t.loop(zero, blocks, one) as b:
                # The part of this thread's unit range that lies in token block b.
                base = t.mul(b.index, "%panels")
                low = t.binary("arith.maxsi", t.binary("arith.subi", "%low", base), zero)
                high = t.binary("arith.minsi", t.binary("arith.subi", "%high", base), "%panels")
                row_low, row_high = thread_share(t, "%tokens", b.index, blocks)
                rows = t.binary("arith.subi", row_high, row_low)
                tiles = _ceil_div(t, rows, target.tile_rows)
                mine = t.compare("slt", low, high)
                with t.loop(zero, t.select(mine, "%depth", zero, "i64"), block) as k:
                    depth = self._block_depth(k.index)
                    first = t.compare("eq", k.index, zero)
                    x = t.gep(t.gep("%x", t.mul(row_low, "%ldx")), k.index)
                    self._call_copy([x, "%ldx", "%scratch", rows, depth])
                    with t.loop(low, high, one) as panel:
                        w = t.gep("%w", t.mul(panel.index, panel_size), "i8")
                        w = self._weights_at(w, k.index)
                        column = t.mul(panel.index, t.constant(target.panel))
                        bias = self._bias_at(panel.index)
                        with t.loop(zero, tiles, one) as tile:
                            start, end = thread_share(t, rows, tile.index, tiles)
                            a = t.gep("%scratch", t.mul(start, t.constant(self.row_bytes)), "i8")
                            row = t.add(row_low, start)
                            c = t.gep(t.gep("%out", t.mul(row, "%ldo")), column)
                            call = [a, w, panel_size, c, "%ldo", depth, bias, first]
                            t.switch(
                                t.binary("arith.subi", end, start),
                                {
                                    size: partial(self._call_tile, TileShape(size, 1), call)
                                    for size in range(1, target.tile_rows + 1)
                                },
                            )
            t.line("return")

    def _entry(self) -> None:
        """The kernel: chooses by token count who computes what."""
        t, most = self.t, self.target.tile_rows
        with t.function(linear_name(self.form), SIGNATURE):
            zero, block = t.constant(0), t.constant(BLOCK_K)
            low, high = thread_share(t, "%panels", "%tid", "%team")

            def few(rows: int) -> None:
                with t.loop(zero, "%depth", block) as k:
                    depth = self._block_depth(k.index)
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
        units = _ceil_div(self.t, "%depth", self.form.unit)
        return self.t.mul(units, self.t.constant(self.form.unit_bytes(self.target.panel)))

    def _weights_at(self, panel: str, k: str) -> str:
        """Address of depth k (a multiple of BLOCK_K) in a panel."""
        number = self.t.binary("arith.divui", k, self.t.constant(self.form.unit))
        size = self.t.constant(self.form.unit_bytes(self.target.panel))
        return self.t.gep(panel, self.t.mul(number, size), "i8")

    def _block_depth(self, k: str) -> str:
        """Depth of the K block that starts at k."""
        left = self.t.binary("arith.subi", "%depth", k)
        return self.t.binary("arith.minui", left, self.t.constant(BLOCK_K))

    def _bias_at(self, panel: str) -> str:
        """Address of the bias of `panel`, or null when there is none."""
        t = self.t
        place = t.gep("%bias", t.mul(panel, t.constant(self.target.panel)))
        return t.select(t.is_null("%bias"), "%bias", place, "!llvm.ptr")

    def _call_tile(self, shape: TileShape, values: list[str]) -> None:
        self.t.call(_tile_name(shape), list(zip(values, _TILE_KINDS, strict=True)))

    def _call_copy(self, values: list[str]) -> None:
        kinds = [kind for _, kind in _COPY_ARGS]
        self.t.call("copy_rows", list(zip(values, kinds, strict=True)))


def _tile_name(shape: TileShape) -> str:
    return f"tile_r{shape.rows}_p{shape.panels}"


def _ceil_div(t: Text, value: str, by: int) -> str:
    if by == 1:
        return value
    return t.binary("arith.divui", t.add(value, t.constant(by - 1)), t.constant(by))
