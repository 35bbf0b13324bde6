"""The linear kernel: out = x · Wᵀ + bias on packed weights, for any number of tokens.

Weights lie in panels `[N/panel][K][panel]` (`panel` outputs side by side, see `Target.panel`), so
that one token streams them once and many tokens reuse a panel from cache. Every output is one chain
of fused multiply-adds over k = 0, 1, …, K-1, started from the bias: tiles, cache blocks and threads
only decide who computes which chain, so results are bit-identical for any token count and team.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Depth of one cache block over K: a panel block (256 × 32 × 4 bytes) stays in L2, the activation
#: rows of one tile in L1.
BLOCK_K = 256
#: Row stride of packed activations: not a multiple of a page, so that rows do not share cache sets.
ROW_STRIDE = BLOCK_K + 16
#: Register tiles in one block of tokens; the packed block fills a fraction of L2.
BLOCK_TILES = 9


@dataclass(frozen=True)
class TileShape:
    """One register tile: `rows` tokens by `panels` weight panels."""

    rows: int
    panels: int

    @property
    def name(self) -> str:
        """The symbol of the tile's function."""
        return f"tile_r{self.rows}_p{self.panels}"


def panels_for(target: Target, rows: int) -> int:
    """Panels that a tile of `rows` tokens takes at once when tokens are few: enough independent
    chains to hide the latency of the multiply-add, and several streams from memory."""
    columns = target.panel_vectors
    most = (target.registers - 1) // (columns * (rows + 1))
    return max(1, min(4, most))


def linear_scratch_bytes(target: Target, depth: int) -> int:
    """Bytes of scratch per thread that the kernel needs for K = `depth`."""
    blocks = -(-depth // BLOCK_K)
    rows = max(BLOCK_TILES, blocks) * target.tile_rows
    return rows * ROW_STRIDE * 4


def linear_name() -> str:
    """The kernel's symbol."""
    return "bp_linear_f32"


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


def emit_linear(target: Target) -> str:
    """MLIR text of the module that holds the kernel for `target`."""
    text = Text()
    shapes = {TileShape(rows, 1) for rows in range(1, target.tile_rows + 1)}
    shapes |= {TileShape(r, panels_for(target, r)) for r in range(1, target.tile_rows + 1)}
    for shape in sorted(shapes, key=lambda s: (s.rows, s.panels)):
        _emit_tile(text, target, shape)
    _emit_copy_rows(text, target)
    _emit_one_token(text, target)
    for rows in range(2, target.tile_rows + 1):
        _emit_few_tokens(text, target, rows)
    _emit_many_tokens(text, target)
    _emit_entry(text, target)
    return str(text)


def _emit_tile(t: Text, target: Target, shape: TileShape) -> None:
    """`tile(a, w, wstride, c, ldc, depth, bias, first)`: c[rows][panels·panel] (+)= a · w.

    `a` has rows `ROW_STRIDE` apart; `wstride` is the distance of panels in elements; `first` says
    whether chains start from the bias or go on from what c holds.
    """
    lanes, vectors = target.lanes, target.panel_vectors
    vector = f"vector<{lanes}xf32>"
    align = lanes * 4
    args = [
        ("a", "!llvm.ptr"),
        ("w", "!llvm.ptr"),
        ("wstride", "i64"),
        ("c", "!llvm.ptr"),
        ("ldc", "i64"),
        ("depth", "i64"),
        ("bias", "!llvm.ptr"),
        ("first", "i1"),
    ]
    places = [
        (row, panel, v)
        for row in range(shape.rows)
        for panel in range(shape.panels)
        for v in range(vectors)
    ]
    with t.function(shape.name, args, private=True):
        zero, one = t.constant(0), t.constant(1)
        rows = ["%c"]
        for _ in range(1, shape.rows):
            rows.append(t.gep(rows[-1], "%ldc"))
        panels = ["%w"]
        for _ in range(1, shape.panels):
            panels.append(t.gep(panels[-1], "%wstride"))
        outputs = [t.gep(rows[row], panel * target.panel + v * lanes) for row, panel, v in places]
        columns = [(panel, v) for panel in range(shape.panels) for v in range(vectors)]

        def bias_or_zero() -> list[str]:
            def bias() -> list[str]:
                places = [t.gep("%bias", p * target.panel + v * lanes) for p, v in columns]
                return [t.load(place, vector, align) for place in places]

            def nothing() -> list[str]:
                return [t.constant(0.0, vector)] * len(columns)

            starts = t.choose(t.is_null("%bias"), nothing, bias, [vector] * len(columns))
            by_column = dict(zip(columns, starts, strict=True))
            return [by_column[p, v] for _, p, v in places]

        def so_far() -> list[str]:
            return [t.load(out, vector, align) for out in outputs]

        start = t.choose("%first", bias_or_zero, so_far, [vector] * len(places))

        def steps(k: str, accumulators: list[str], count: int) -> list[str]:
            """`count` steps of every chain, from depth `k` on."""
            offset = t.mul(k, t.constant(target.panel))
            bases = [t.gep(panel, offset) for panel in panels]
            inputs = t.gep("%a", k)
            for step in range(count):
                weights = {
                    (p, v): t.load(t.gep(bases[p], step * target.panel + v * lanes), vector, align)
                    for p in range(shape.panels)
                    for v in range(vectors)
                }
                activation = ""
                following = []
                for accumulator, (row, p, v) in zip(accumulators, places, strict=True):
                    if (p, v) == (0, 0):
                        scalar = t.load(t.gep(inputs, row * ROW_STRIDE + step), "f32")
                        activation = t.broadcast(scalar, vector)
                    following.append(t.fma(activation, weights[p, v], accumulator, vector))
                accumulators = following
            return accumulators

        unroll = max(1, 8 // shape.rows)
        whole = t.op(f"arith.remui %depth, {t.constant(unroll)} : i64")
        whole = t.binary("arith.subi", "%depth", whole)
        with t.loop(zero, whole, t.constant(unroll), [(s, vector) for s in start]) as main:
            main.next = steps(main.index, main.carried, unroll)
        results = main.results
        if unroll > 1:
            with t.loop(whole, "%depth", one, [(r, vector) for r in results]) as rest:
                rest.next = steps(rest.index, rest.carried, 1)
            results = rest.results
        for result, out in zip(results, outputs, strict=True):
            t.store(result, out, vector, align)
        t.line("return")


def _emit_copy_rows(t: Text, target: Target) -> None:
    """`copy_rows(x, ldx, to, rows, depth)`: rows of `depth` elements, `ROW_STRIDE` apart."""
    lanes = target.lanes
    vector = f"vector<{lanes}xf32>"
    args = [
        ("x", "!llvm.ptr"),
        ("ldx", "i64"),
        ("to", "!llvm.ptr"),
        ("rows", "i64"),
        ("depth", "i64"),
    ]
    with t.function("copy_rows", args, private=True):
        zero, one, width = t.constant(0), t.constant(1), t.constant(lanes)
        whole = t.binary("arith.subi", "%depth", t.op(f"arith.remui %depth, {width} : i64"))
        with t.loop(zero, "%rows", one) as row:
            source = t.gep("%x", t.mul(row.index, "%ldx"))
            target_row = t.gep("%to", t.mul(row.index, t.constant(ROW_STRIDE)))
            with t.loop(zero, whole, width) as k:
                value = t.load(t.gep(source, k.index), vector)
                t.store(value, t.gep(target_row, k.index), vector)
            with t.loop(whole, "%depth", one) as k:
                value = t.load(t.gep(source, k.index), "f32")
                t.store(value, t.gep(target_row, k.index), "f32")
        t.line("return")


def _tile_args(
    a: str, w: str, wstride: str, c: str, ldc: str, depth: str, bias: str, first: str
) -> list[tuple[str, str]]:
    kinds = ["!llvm.ptr", "!llvm.ptr", "i64", "!llvm.ptr", "i64", "i64", "!llvm.ptr", "i1"]
    return list(zip([a, w, wstride, c, ldc, depth, bias, first], kinds, strict=True))


def _copy_args(x: str, to: str, rows: str, depth: str) -> list[tuple[str, str]]:
    kinds = ["!llvm.ptr", "i64", "!llvm.ptr", "i64", "i64"]
    return list(zip([x, "%ldx", to, rows, depth], kinds, strict=True))


def _bias_at(t: Text, panel: str, target: Target) -> str:
    """Address of the bias of `panel`, or null when there is none."""
    place = t.gep("%bias", t.mul(panel, t.constant(target.panel)))
    return t.select(t.is_null("%bias"), "%bias", place, "!llvm.ptr")


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


def _emit_one_token(t: Text, target: Target) -> None:
    """`one_token(a, out, ldo, w, bias, depth, low, high)`: panels low … high of one token, the
    whole chain in registers, weights streamed once."""
    with t.function("one_token", _RANGE_ARGS, private=True):
        true = t.op("arith.constant true")
        panel_size = t.mul("%depth", t.constant(target.panel))

        def tile(shape: TileShape, panel: str) -> None:
            w = t.gep("%w", t.mul(panel, panel_size))
            c = t.gep("%out", t.mul(panel, t.constant(target.panel)))
            bias = _bias_at(t, panel, target)
            t.call(
                shape.name,
                _tile_args("%a", w, panel_size, c, "%ldo", "%depth", bias, true),
            )

        _emit_panel_groups(t, target, 1, tile)
        t.line("return")


def _emit_panel_groups(
    t: Text, target: Target, rows: int, tile: Callable[[TileShape, str], None]
) -> None:
    """Loops over panels %low … %high in groups of `panels_for(rows)`, then the rest singly."""
    one = t.constant(1)
    group = panels_for(target, rows)
    low = "%low"
    if group > 1:
        count = t.binary("arith.subi", "%high", "%low")
        rest = t.op(f"arith.remui {count}, {t.constant(group)} : i64")
        low = t.binary("arith.subi", "%high", rest)
        with t.loop("%low", low, t.constant(group)) as panel:
            tile(TileShape(rows, group), panel.index)
    with t.loop(low, "%high", one) as panel:
        tile(TileShape(rows, 1), panel.index)


def _emit_few_tokens(t: Text, target: Target, rows: int) -> None:
    """`few_tokens_R(…)`: one tile of R tokens, packed `[K block][R][ROW_STRIDE]` in %a, over panels
    low … high; each panel group runs through all of K while its outputs stay in L1."""
    with t.function(f"few_tokens_{rows}", _RANGE_ARGS, private=True):
        zero, block = t.constant(0), t.constant(BLOCK_K)
        panel_size = t.mul("%depth", t.constant(target.panel))

        def tile(shape: TileShape, panel: str) -> None:
            w = t.gep("%w", t.mul(panel, panel_size))
            c = t.gep("%out", t.mul(panel, t.constant(target.panel)))
            bias = _bias_at(t, panel, target)
            with t.loop(zero, "%depth", block) as k:
                left = t.binary("arith.subi", "%depth", k.index)
                depth = t.binary("arith.minui", left, block)
                number = t.binary("arith.divui", k.index, block)
                a = t.gep("%a", t.mul(number, t.constant(rows * ROW_STRIDE)))
                wk = t.gep(w, t.mul(k.index, t.constant(target.panel)))
                first = t.compare("eq", k.index, zero)
                t.call(shape.name, _tile_args(a, wk, panel_size, c, "%ldo", depth, bias, first))

        _emit_panel_groups(t, target, rows, tile)
        t.line("return")


def _emit_many_tokens(t: Text, target: Target) -> None:
    """`many_tokens(…)`: blocks of tokens × K; the team shares (token block, panel) units."""
    args = [*SIGNATURE[:9], ("low", "i64"), ("high", "i64"), ("scratch", "!llvm.ptr")]
    most = target.tile_rows * BLOCK_TILES
    with t.function("many_tokens", args, private=True):
        zero, one, block = t.constant(0), t.constant(1), t.constant(BLOCK_K)
        panel_size = t.mul("%depth", t.constant(target.panel))
        blocks = _ceil_div(t, "%tokens", most)
        with t.loop(zero, blocks, one) as b:
            # The part of this thread's unit range that lies in token block b.
            base = t.mul(b.index, "%panels")
            low = t.binary("arith.maxsi", t.binary("arith.subi", "%low", base), zero)
            high = t.binary("arith.minsi", t.binary("arith.subi", "%high", base), "%panels")
            row_low = _share(t, b.index, "%tokens", blocks)
            row_high = _share(t, t.add(b.index, one), "%tokens", blocks)
            rows = t.binary("arith.subi", row_high, row_low)
            tiles = _ceil_div(t, rows, target.tile_rows)
            mine = t.compare("slt", low, high)
            depth_end = t.select(mine, "%depth", zero, "i64")
            with t.loop(zero, depth_end, block) as k:
                left = t.binary("arith.subi", "%depth", k.index)
                depth = t.binary("arith.minui", left, block)
                first = t.compare("eq", k.index, zero)
                x = t.gep(t.gep("%x", t.mul(row_low, "%ldx")), k.index)
                t.call("copy_rows", _copy_args(x, "%scratch", rows, depth))
                with t.loop(low, high, one) as panel:
                    w = t.gep("%w", t.mul(panel.index, panel_size))
                    w = t.gep(w, t.mul(k.index, t.constant(target.panel)))
                    column = t.mul(panel.index, t.constant(target.panel))
                    bias = _bias_at(t, panel.index, target)
                    with t.loop(zero, tiles, one) as tile:
                        start = _share(t, tile.index, rows, tiles)
                        end = _share(t, t.add(tile.index, one), rows, tiles)
                        count = t.binary("arith.subi", end, start)
                        a = t.gep("%scratch", t.mul(start, t.constant(ROW_STRIDE)))
                        row = t.add(row_low, start)
                        c = t.gep(t.gep("%out", t.mul(row, "%ldo")), column)
                        tile_args = _tile_args(a, w, panel_size, c, "%ldo", depth, bias, first)
                        t.switch(
                            count,
                            {
                                size: partial(t.call, TileShape(size, 1).name, tile_args)
                                for size in range(1, target.tile_rows + 1)
                            },
                        )
        t.line("return")


def _share(t: Text, index: str, total: str, parts: str) -> str:
    """Start of part `index` when `total` is dealt evenly to `parts`."""
    return t.binary("arith.divui", t.mul(index, total), parts)


def _ceil_div(t: Text, value: str, by: int) -> str:
    return t.binary("arith.divui", t.add(value, t.constant(by - 1)), t.constant(by))


def _emit_entry(t: Text, target: Target) -> None:
    """The kernel: chooses by token count who computes what."""
    with t.function(linear_name(), SIGNATURE):
        zero, one, block = t.constant(0), t.constant(1), t.constant(BLOCK_K)
        low = _share(t, "%tid", "%panels", "%team")
        high = _share(t, t.add("%tid", one), "%panels", "%team")

        def range_args(a: str) -> list[tuple[str, str]]:
            values = [a, "%out", "%ldo", "%w", "%bias", "%depth", low, high]
            return [(v, kind) for v, (_, kind) in zip(values, _RANGE_ARGS, strict=True)]

        def few(rows: int) -> None:
            with t.loop(zero, "%depth", block) as k:
                depth = t.binary("arith.minui", t.binary("arith.subi", "%depth", k.index), block)
                number = t.binary("arith.divui", k.index, block)
                to = t.gep("%scratch", t.mul(number, t.constant(rows * ROW_STRIDE)))
                t.call("copy_rows", _copy_args(t.gep("%x", k.index), to, "%tokens", depth))
            t.call(f"few_tokens_{rows}", range_args("%scratch"))

        cases: dict[int, Callable[[], object]] = {
            rows: partial(few, rows) for rows in range(2, target.tile_rows + 1)
        }
        cases[1] = partial(t.call, "one_token", range_args("%x"))
        t.switch("%tokens", cases)
        with t.when(t.compare("ugt", "%tokens", t.constant(target.tile_rows))):
            units = t.mul(_ceil_div(t, "%tokens", target.tile_rows * BLOCK_TILES), "%panels")
            first = _share(t, "%tid", units, "%team")
            last = _share(t, t.add("%tid", one), units, "%team")
            call = [(f"%{name}", kind) for name, kind in SIGNATURE[:9]]
            t.call(
                "many_tokens",
                [*call, (first, "i64"), (last, "i64"), ("%scratch", "!llvm.ptr")],
            )
        t.line("return")
