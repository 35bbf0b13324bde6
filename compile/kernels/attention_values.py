"""The last step of attention over one span: sums of values by weight."""

from buddy_pipeline.compile.kernels.attention_cached import value_scales, widened
from buddy_pipeline.compile.kernels.attention_shape import (
    WEIGHTS_STRIDE,
    AttentionShape,
    Rows,
)
from buddy_pipeline.compile.mlir_text import CACHE_LINE, Text
from buddy_pipeline.compile.target import Target

#: Positions from the one that is added to the one that is fetched into the first cache: rows of
#: values are read a few columns at a time, which hardware does not foresee (5 % of a span).
_PREFETCH = 8

_VALUES_ARGS = [
    ("weights", "!llvm.ptr"),
    ("values", "!llvm.ptr"),
    ("low", "i64"),
    ("high", "i64"),
    ("own", "i1"),
    ("to", "!llvm.ptr"),
]


def values_args(values: list[str]) -> list[tuple[str, str]]:
    """Arguments of a `values` function with their types."""
    return [(v, kind) for v, (_, kind) in zip(values, _VALUES_ARGS, strict=True)]


def emit_values(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
    """`values_NxH_CACHE(weights, values, low, high, own, to)`: weights · values over the places
    low … high - 1 of a span; with `own`, token i also sees the i places from `high` on.

    One chain over positions for each row and element, in registers for some columns at a time.
    What a token must not see cannot reach it, not even as a NaN times 0.
    """
    with t.function(shape.part("values", rows), _VALUES_ARGS, private=True):
        _Values(t, target, shape, rows).write()
        t.line("return")


class _Values:
    """Writes the body of one `values` function."""

    def __init__(self, t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
        self.t, self.target, self.shape, self.rows = t, target, shape, rows
        self.lanes = target.lanes
        self.vector = f"vector<{self.lanes}xf32>"

    def write(self) -> None:
        """Chunks of as many columns as fit the registers."""
        t, shape = self.t, self.shape
        columns = shape.value_stride // self.lanes
        beside = 2 if shape.is_int8 else 1  # a weight, and a scale
        free = self.target.registers - beside
        width = free // (self.rows.count + 1)
        if shape.element != "f32":  # LLVM has several under way as they are cached and widened
            width = min(width, max(2, free // (self.rows.count + 3)))
        width = max(1, min(columns, width))
        whole = columns // width * width
        step = t.constant(width * self.lanes)
        with t.loop(t.constant(0), t.constant(whole * self.lanes), step) as chunk:
            self._chunk(chunk.index, width)
        if whole < columns:
            self._chunk(t.constant(whole * self.lanes), columns - whole)

    def _chunk(self, column: str, width: int) -> None:
        """The sums of `width` vectors from element `column` on."""
        t, vector, tokens = self.t, self.vector, self.rows.tokens
        rows = range(self.rows.count)
        begun = [(t.constant(0.0, vector), vector)] * (len(rows) * width)
        with t.loop("%low", "%high", t.constant(1), begun) as position:
            self._prefetch(position.index, column, width)
            position.next = self._add(position.index, column, width, position.carried, 0)
        chains = position.results

        def of_their_own() -> list[str]:
            added = chains
            for token in range(1, tokens):
                place = t.add("%high", t.constant(token - 1))
                added = self._add(place, column, width, added, token * self.rows.heads)
            return added

        if tokens > 1:
            kinds = [vector] * len(chains)
            chains = t.choose("%own", of_their_own, lambda: chains, kinds)
        to = t.gep("%to", column)
        for r in rows:
            for j in range(width):
                place = t.gep(to, r * self.shape.value_stride + j * self.lanes)
                t.store(chains[r * width + j], place, vector)

    def _prefetch(self, place: str, column: str, width: int) -> None:
        """Asks for what `_add` will read some positions later."""
        t, shape = self.t, self.shape
        stride = t.constant(shape.layer.value_elements)
        row = t.gep("%values", t.mul(t.add(place, t.constant(_PREFETCH)), stride), shape.element)
        at = t.gep(row, column, shape.element)
        for byte in range(0, width * self.lanes * shape.layer.element_bytes, CACHE_LINE):
            t.prefetch(t.gep(at, byte, "i8"), nearest=True)

    def _add(
        self, place: str, column: str, width: int, chains: list[str], first_row: int
    ) -> list[str]:
        """Chains with one position added to those of the rows from `first_row` on."""
        t, shape, vector = self.t, self.shape, self.vector
        row = t.gep("%values", t.mul(place, t.constant(shape.layer.value_elements)), shape.element)
        at = t.gep(row, column, shape.element)
        scales = value_scales(t, self.target, shape, row, column, width)
        loaded = [
            widened(t, self.target, shape, t.gep(at, j * self.lanes, shape.element), scales[j])
            for j in range(width)
        ]
        weights = t.gep("%weights", place)
        following = chains[: first_row * width]
        for r in range(first_row, self.rows.count):
            scalar = t.load(t.gep(weights, r * WEIGHTS_STRIDE), "f32")
            weight = t.broadcast(scalar, vector)
            for j in range(width):
                following.append(t.fma(weight, loaded[j], chains[r * width + j], vector))
        return following
