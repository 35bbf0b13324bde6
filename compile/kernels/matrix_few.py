"""Few tokens of the matrix unit's linear, in vector registers and to the same bits.

A tile loads 16 lines with one instruction; vector registers may take weights from several panels as
they come. SmolLM2 decodes 1.03 times as fast in them with one panel at a time, and 1.07 times as
fast again with three; four tokens are no faster. So few tokens take fused multiply-adds in the
order in which the unit adds: over the 32 k of a tile two chains for each output, of even and of odd
k, from zero on; then output += even + odd. Like the unit they take subnormal numbers for zero
(Intel's Software Developer's Manual, volume 2, TDPBF16PS).
"""

from collections.abc import Callable
from functools import partial

from buddy_pipeline.compile.formats.base import places, prefetch_ahead
from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.linear_outputs import LinearOutputs
from buddy_pipeline.compile.kernels.linear_parts import ceil_div
from buddy_pipeline.compile.kernels.matrix_tiles import TILE_DEPTH

#: The most tokens that do without the unit.
MOST_FEW = 3
#: Panels that one token reads at once: decoding SmolLM2 is 1.07 and 1.04 times as fast with 1 and 2
#: threads. Two and three tokens are slower with it.
_PANELS_OF_ONE = 3
#: The control register's bits that make subnormal operands and results zero.
_NO_SUBNORMALS = 0x8040
_PAIRS = TILE_DEPTH // 2

_ARGS = [
    ("x", "!llvm.ptr"),
    ("ldx", "i64"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("w", "!llvm.ptr"),
    ("bias", "!llvm.ptr"),
    ("depth", "i64"),
    ("low", "i64"),
    ("high", "i64"),
]


class FewTokens:
    """Writes `few_tokens_R(…)` for R tokens: panels low … high over all of K."""

    def __init__(self, parts: LinearOutputs, rows: int) -> None:
        self._parts, self._t, self._target = parts, parts.t, parts.target
        self._rows, self._vector = rows, parts.vector
        self._places = places(parts.target, rows)
        self._kinds = [parts.vector] * len(self._places)

    def emit(self) -> None:
        """The function; `x` are rows as `emit_round_rows` leaves them."""
        t = self._t
        with t.function(_name(self._rows), _ARGS, private=True):
            at_once = _PANELS_OF_ONE if self._rows == 1 else 1
            count = t.binary("arith.subi", "%high", "%low")
            rest = t.op(f"arith.remui {count}, {t.constant(at_once)} : i64")
            middle = t.binary("arith.subi", "%high", rest)
            self._panels("%low", middle, at_once)
            if at_once > 1:
                self._panels(middle, "%high", 1)
            t.line("return")

    def _panels(self, low: str, high: str, at_once: int) -> None:
        """Panels low … high, so many side by side."""
        t, parts, target = self._t, self._parts, self._target
        with t.loop(low, high, t.constant(at_once)) as first:
            panels = [t.add(first.index, t.constant(number)) for number in range(at_once)]
            weights = [t.gep("%w", t.mul(panel, parts.panel_bytes()), "i8") for panel in panels]
            start = [self._start(parts.bias_at(panel)) for panel in panels]
            for panel, sums in zip(panels, self._over_depth(weights, start), strict=True):
                out = t.gep("%out", t.mul(panel, t.constant(target.panel)))
                for value, (row, v) in zip(sums, self._places, strict=True):
                    line = t.gep(out, t.mul("%ldo", t.constant(row)))
                    t.store(value, t.gep(line, v * target.lanes), self._vector, 4 * target.lanes)

    def _over_depth(self, weights: list[str], start: list[list[str]]) -> list[list[str]]:
        """Each panel's sums over all of K, from `start` on."""
        t, zero, one = self._t, self._t.constant(0), self._t.constant(1)
        pairs = ceil_div(t, "%depth", 2)
        whole = t.binary("arith.divui", pairs, t.constant(_PAIRS))
        whole_pairs = t.mul(whole, t.constant(_PAIRS))
        clear = [self._zeros() * 2 for _ in weights]
        with t.loop(zero, whole, one, self._typed(start)) as tile:
            first = t.mul(tile.index, t.constant(_PAIRS))
            chains = clear
            for pair in range(_PAIRS):
                chains = self._pairs(weights, first, pair, chains)
            tile.next = self._sums(tile.carried, chains)

        def rest() -> list[str]:
            with t.loop(whole_pairs, pairs, one, self._typed(clear)) as pair:
                chains = self._pairs(weights, pair.index, 0, _split(pair.carried, len(weights)))
                pair.next = [chain for each in chains for chain in each]
            # The unit goes on with zeros to the end of the tile, which matters to -0.
            zero = t.constant(0.0, self._vector)
            padded = [t.fma(zero, zero, chain, self._vector) for chain in pair.results]
            return self._sums(tile.results, _split(padded, len(weights)))

        has_rest = t.compare("ult", whole_pairs, pairs)
        kinds = self._kinds * len(weights)
        return _split(t.choose(has_rest, rest, lambda: tile.results, kinds), len(weights))

    def _typed(self, values: list[list[str]]) -> list[tuple[str, str]]:
        """The values of all panels, in one row, with their types."""
        return [(value, self._vector) for each in values for value in each]

    def _start(self, bias: str) -> list[str]:
        """The bias of each output, or zeros."""
        t, target = self._t, self._target

        def biases() -> list[str]:
            vectors = range(0, target.panel, target.lanes)
            align = 4 * target.lanes
            return [t.load(t.gep(bias, at), self._vector, align) for at in vectors] * self._rows

        return t.choose(t.is_null("%bias"), self._zeros, biases, self._kinds)

    def _zeros(self) -> list[str]:
        return [self._t.constant(0.0, self._vector)] * len(self._places)

    def _pairs(
        self, weights: list[str], number: str, beyond: int, chains: list[list[str]]
    ) -> list[list[str]]:
        """`_pair` of each panel."""
        panels = zip(weights, chains, strict=True)
        return [self._pair(w, number, beyond, each) for w, each in panels]

    def _pair(self, w: str, number: str, beyond: int, chains: list[str]) -> list[str]:
        """Pair `number` + `beyond` of k: the even one to the first half of the chains, the odd one
        to the second."""
        t, target, lanes = self._t, self._target, self._target.lanes
        words = f"vector<{lanes}xi32>"
        first = t.gep(w, t.mul(number, t.constant(target.panel)), "i32")
        place = t.gep(first, beyond * target.panel, "i32")
        prefetch_ahead(t, target, self._parts.form, self._rows, place)
        vectors = range(0, target.panel, lanes)
        pairs = [t.load(t.gep(place, v, "i32"), words, 4 * lanes) for v in vectors]
        shift, mask = t.constant(16, words), t.constant(-65536, words)
        even = [t.binary("arith.shli", pair, shift, words) for pair in pairs]
        odd = [t.binary("arith.andi", pair, mask, words) for pair in pairs]
        x = t.gep("%x", t.add(t.mul(number, t.constant(2)), t.constant(2 * beyond)))
        count = len(self._places)
        return [
            *self._products(even, x, chains[:count]),
            *self._products(odd, t.gep(x, 1), chains[count:]),
        ]

    def _products(self, upper: list[str], x: str, chains: list[str]) -> list[str]:
        """chain + weight · x of one k, whose weights are the upper halves of words."""
        t, words = self._t, f"vector<{self._target.lanes}xi32>"
        weights = [t.op(f"arith.bitcast {w} : {words} to {self._vector}") for w in upper]
        following, spread = [], ""
        for chain, (row, v) in zip(chains, self._places, strict=True):
            if v == 0:
                scalar = t.load(t.gep(x, t.mul("%ldx", t.constant(row))), "f32")
                spread = t.broadcast(scalar, self._vector)
            following.append(t.fma(spread, weights[v], chain, self._vector))
        return following

    def _sums(self, sums: list[str], chains: list[list[str]]) -> list[str]:
        """sum + (even + odd) of every output of all panels."""
        t, count = self._t, len(self._places)
        both = [pair for each in chains for pair in zip(each[:count], each[count:], strict=True)]
        added = [t.binary("arith.addf", even, odd, self._vector) for even, odd in both]
        return [
            t.binary("arith.addf", total, more, self._vector)
            for total, more in zip(sums, added, strict=True)
        ]


def _split(values: list[str], count: int) -> list[list[str]]:
    """`count` equal parts of a list."""
    size = len(values) // count
    return [values[start : start + size] for start in range(0, len(values), size)]


_ROUND_ARGS = [
    ("x", "!llvm.ptr"),
    ("ldx", "i64"),
    ("to", "!llvm.ptr"),
    ("ldto", "i64"),
    ("rows", "i64"),
    ("depth", "i64"),
]


def emit_round_rows(parts: LinearOutputs) -> None:
    """`round_rows(x, ldx, to, ldto, rows, depth)`: rows of x rounded to bf16, kept as f32, and a
    zero behind a row of odd depth."""
    t, target = parts.t, parts.target
    with t.function("round_rows", _ROUND_ARGS, private=True):
        zero, one, width = t.constant(0), t.constant(1), t.constant(target.lanes)
        whole = t.mul(t.binary("arith.divui", "%depth", width), width)
        with t.loop(zero, "%rows", one) as row:
            source = t.gep("%x", t.mul(row.index, "%ldx"))
            to = t.gep("%to", t.mul(row.index, "%ldto"))
            t.store(t.constant(0.0, "f32"), t.gep(to, "%depth"), "f32")
            for low, high, step, lanes in (
                (zero, whole, width, target.lanes),
                (whole, "%depth", one, 0),
            ):
                types = vm.Lanes(lanes)
                with t.loop(low, high, step) as k:
                    value = t.load(t.gep(source, k.index), types.of("f32"))
                    half = vm.narrowed(t, value, "bf16", types, target)
                    wide = t.op(f"arith.extf {half} : {types.of('bf16')} to {types.of('f32')}")
                    t.store(wide, t.gep(to, k.index), types.of("f32"))
        t.line("return")


def few_tokens_bytes(depth: int) -> int:
    """Bytes of scratch that most tokens of K = `depth` need."""
    return MOST_FEW * 4 * (depth + 1)


def call_few_tokens(parts: LinearOutputs, rows: int) -> None:
    """Inside the kernel: all of it for `rows` tokens."""
    t = parts.t
    ld = t.add("%depth", t.constant(1))
    parts.call("round_rows", _ROUND_ARGS, ["%x", "%ldx", "%scratch", ld, "%tokens", "%depth"])
    low, high = parts.share(t.constant(1))
    values = ["%scratch", ld, "%out", "%ldo", "%w", "%bias", "%depth", low, high]
    _without_subnormals(parts, partial(parts.call, _name(rows), _ARGS, values))
    outputs = t.gep("%out", t.mul(low, t.constant(parts.target.panel)))
    parts.finish(outputs, "%ldo", t.constant(0), "%tokens", low, high)


def _without_subnormals(parts: LinearOutputs, work: Callable[[], object]) -> None:
    """Runs `work` with the CPU's control register set as the matrix unit works."""
    t = parts.t
    before = t.op(f"llvm.alloca {t.constant(1)} x i32 : (i64) -> !llvm.ptr")
    during = t.op(f"llvm.alloca {t.constant(1)} x i32 : (i64) -> !llvm.ptr")
    t.line(f'llvm.call_intrinsic "llvm.x86.sse.stmxcsr"({before}) : (!llvm.ptr) -> ()')
    bits = t.constant(_NO_SUBNORMALS, "i32")
    t.store(t.binary("arith.ori", t.load(before, "i32"), bits, "i32"), during, "i32")
    t.line(f'llvm.call_intrinsic "llvm.x86.sse.ldmxcsr"({during}) : (!llvm.ptr) -> ()')
    work()
    t.line(f'llvm.call_intrinsic "llvm.x86.sse.ldmxcsr"({before}) : (!llvm.ptr) -> ()')


def _name(rows: int) -> str:
    return f"few_tokens_{rows}"
