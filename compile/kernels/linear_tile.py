"""The register tile of the linear kernel: some tokens by one panel of outputs over a K block."""

from functools import partial

from buddy_pipeline.compile.formats.base import (
    activation_bytes,
    fetches_for_itself,
    places,
    prefetch,
)
from buddy_pipeline.compile.kernels.linear_parts import LinearParts, ceil_div

#: Multiplications of a weight that are written out one after the other.
_UNROLL = 8

#: Names and types of what a K block of some tokens by one panel is made from: packed activations,
#: weights, outputs and their row stride, depth, bias, scales, whether chains begin and end here.
BLOCK_ARGS = [
    ("a", "!llvm.ptr"),
    ("w", "!llvm.ptr"),
    ("c", "!llvm.ptr"),
    ("ldc", "i64"),
    ("depth", "i64"),
    ("bias", "!llvm.ptr"),
    ("scales", "!llvm.ptr"),
    ("first", "i1"),
    ("last", "i1"),
]
_ARGS = [*BLOCK_ARGS, ("ahead", "!llvm.ptr"), ("pace", "i64")]


class LinearTile:
    """Writes `tile_R(a, w, c, ldc, depth, bias, scales, first, last, ahead, pace)`:
    c[R][panel] (+)= a · w, for R = `rows` tokens.

    Rows of `a` are `row_bytes` apart; `first` says whether chains begin or go on from what c holds,
    `last` whether they end here. A panel's only tile that has the time (see `fetches_for_itself`)
    asks for a unit's worth of bytes at `ahead` with each unit, one of several for `pace` bytes, at
    most half as many.
    """

    def __init__(self, parts: LinearParts, rows: int) -> None:
        self._t, self._target, self._form = parts.t, parts.target, parts.form
        self._rows, self._vector = rows, parts.vector
        self._places = places(parts.target, rows)
        self._kinds = [parts.vector] * len(self._places)
        self._unit_bytes = parts.form.unit_bytes(parts.target.panel)
        self._is_one_of_several = rows in sizes_of_several(parts)
        self._unit_inputs = activation_bytes(parts.activation, parts.form.unit)

    def emit(self) -> None:
        """The function."""
        t, form = self._t, self._form
        with t.function(_name(self._rows), _ARGS, private=True):
            outputs = self._outputs()
            # Outputs of many tokens are in no near cache when the tile ends (1 to 2 % of it).
            for output in outputs if self._is_one_of_several else ():
                t.prefetch(output, nearest=True, write=True)
            chains = self._fetching_chains(self._start(outputs))
            if form.scaled:
                unscaled = chains
                scaled = partial(self._scaled, unscaled)
                chains = t.choose("%last", scaled, lambda: unscaled, self._kinds)
            for chain, output in zip(chains, outputs, strict=True):
                t.store(chain, output, self._vector, self._align)
            t.line("return")

    @property
    def _align(self) -> int:
        return 4 * self._target.lanes

    def _outputs(self) -> list[str]:
        """The address of every accumulator's outputs."""
        t, lines = self._t, ["%c"]
        for _ in range(1, self._rows):
            lines.append(t.gep(lines[-1], "%ldc"))
        return [t.gep(lines[row], v * self._target.lanes) for row, v in self._places]

    def _start(self, outputs: list[str]) -> list[str]:
        """What the chains go on from: the bias, zero, or the outputs so far."""

        def begin() -> list[str]:
            return (self._zeros() if self._form.scaled else self._bias_or_zero()) * self._rows

        def so_far() -> list[str]:
            return [self._t.load(output, self._vector, self._align) for output in outputs]

        return self._t.choose("%first", begin, so_far, self._kinds)

    def _fetching_chains(self, start: list[str]) -> list[str]:
        """A panel's only tile may fetch all that comes later. Of several each fetches a part, at
        most half: all of it during the first would be a burst that holds up the tile itself (75 and
        83 % of the peak, f32 weights from memory), and without any they wait at each panel's start
        (two tiles of 6 tokens on Q8_0 took 1.7 times as long as two of 7)."""
        t, whole = self._t, self._unit_bytes
        fetches = fetches_for_itself(self._target, self._form, self._rows)
        alone = partial(self._chains, start, whole if fetches else 0)
        if not self._is_one_of_several:
            return alone()
        one_of_several = partial(self._chains, start, whole // 2)
        is_alone = t.compare("eq", "%pace", t.constant(whole))
        return t.choose(is_alone, alone, one_of_several, self._kinds)

    def _chains(self, start: list[str], fetched: int) -> list[str]:
        """Every chain over all units, with `fetched` bytes of what comes later for each."""
        t, zero, one = self._t, self._t.constant(0), self._t.constant(1)
        units = ceil_div(t, "%depth", self._form.unit)
        unroll = max(1, _UNROLL // (self._rows * self._form.unit))
        rest = t.op(f"arith.remui {units}, {t.constant(unroll)} : i64")
        whole = t.binary("arith.subi", units, rest)
        begun = list(zip(start, self._kinds, strict=True))
        with t.loop(zero, whole, t.constant(unroll), begun) as main:
            main.next = self._steps(main.index, main.carried, unroll, fetched)
        if unroll == 1:
            return main.results
        begun = list(zip(main.results, self._kinds, strict=True))
        with t.loop(whole, units, one, begun) as tail:
            tail.next = self._steps(tail.index, tail.carried, 1, fetched)
        return tail.results

    def _steps(self, number: str, accumulators: list[str], count: int, fetched: int) -> list[str]:
        """`count` units of every chain, from unit `number` on."""
        t = self._t
        inputs = t.gep("%a", t.mul(number, t.constant(self._unit_inputs)), "i8")
        base = t.gep("%w", t.mul(number, t.constant(self._unit_bytes)), "i8")
        if fetched:
            prefetch(t, t.gep("%ahead", t.mul(number, "%pace"), "i8"), count * fetched)
        for step in range(count):
            accumulators = self._form.emit_unit(
                t,
                self._target,
                self._rows,
                t.gep(base, step * self._unit_bytes, "i8"),
                t.gep(inputs, step * self._unit_inputs, "i8"),
                accumulators,
            )
        return accumulators

    def _scaled(self, chains: list[str]) -> list[str]:
        """chain · scale + bias of every accumulator."""
        bias, scales = self._bias_or_zero(), self._panel_vectors("%scales")
        return [
            self._t.fma(chain, scales[v], bias[v], self._vector)
            for chain, (_, v) in zip(chains, self._places, strict=True)
        ]

    def _bias_or_zero(self) -> list[str]:
        """The bias of each vector of the panel."""
        t, kinds = self._t, [self._vector] * self._target.panel_vectors
        bias = partial(self._panel_vectors, "%bias")
        return t.choose(t.is_null("%bias"), self._zeros, bias, kinds)

    def _zeros(self) -> list[str]:
        return [self._t.constant(0.0, self._vector)] * self._target.panel_vectors

    def _panel_vectors(self, first: str) -> list[str]:
        """An f32 of each output of the panel."""
        t, lanes = self._t, self._target.lanes
        return [
            t.load(t.gep(first, v * lanes), self._vector, self._align)
            for v in range(self._target.panel_vectors)
        ]


def sizes_of_several(parts: LinearParts) -> range:
    """Tokens of a tile where a panel has more than one: tokens are dealt out evenly."""
    return range((parts.tile_rows + 1) // 2, parts.tile_rows + 1)


def call_tile(parts: LinearParts, rows: int, values: list[str]) -> None:
    """Calls the tile of `rows` tokens; `values` in the order of its arguments."""
    parts.call(_name(rows), _ARGS, values)


def _name(rows: int) -> str:
    return f"tile_{rows}"
