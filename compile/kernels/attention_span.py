"""The inner piece of attention: what some queries see of one span of positions.

Scores of the whole span are computed first, then their softmax, then the sum of values: a row's
maximum is known before its first exponential, and sums of values stay in registers from one end of
the span to the other. Scores count in powers of two: queries are multiplied by log2 e beforehand.
"""

from buddy_pipeline.compile.kernels.attention_positions import begin_in_span, end_in_span
from buddy_pipeline.compile.kernels.attention_queries import emit_queries
from buddy_pipeline.compile.kernels.attention_scores import emit_scores, scores_args
from buddy_pipeline.compile.kernels.attention_shape import (
    WEIGHTS_STRIDE,
    AttentionShape,
    Rows,
)
from buddy_pipeline.compile.kernels.attention_softmax import emit_softmax, softmax_args
from buddy_pipeline.compile.kernels.attention_values import emit_values, values_args
from buddy_pipeline.compile.kernels.attention_widen import emit_widen
from buddy_pipeline.compile.manifest import KV_SPAN
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

_SPAN_ARGS = [
    ("queries", "!llvm.ptr"),
    ("keys", "!llvm.ptr"),
    ("values", "!llvm.ptr"),
    ("low", "i64"),
    ("last", "i64"),
    ("window", "i64"),
    ("softcap", "f32"),
    ("slopes", "!llvm.ptr"),
    ("state", "!llvm.ptr"),
    ("weights", "!llvm.ptr"),
]


def span_args(values: list[str]) -> list[tuple[str, str]]:
    """Arguments of a span function with their types."""
    return [(v, kind) for v, (_, kind) in zip(values, _SPAN_ARGS, strict=True)]


def emit_span(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
    """`span_NxH_CACHE(queries, keys, values, low, last, window, …, state, weights)`: the partial
    result of N tokens at positions last, last + 1, … × H heads over the cache positions
    low … low + KV_SPAN - 1, of which every token must see some, with their `keys` and `values`."""
    emit_queries(t, target, shape, rows)
    emit_scores(t, target, shape, rows)
    emit_softmax(t, target, rows)
    emit_values(t, target, shape, rows)
    with t.function(shape.part("span", rows), _SPAN_ARGS, private=True):
        _span(t, shape, rows)
        t.line("return")


def emit_joint_span(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
    """A span function for tiles of several tokens. It reads f32; `widen` makes that of others."""
    if shape != shape.widened:
        emit_widen(t, target, shape)
        emit_values(t, target, shape.widened, Rows(1, rows.heads))
    emit_span(t, target, shape.widened, rows)


def cached_span(
    t: Text, shape: AttentionShape, keys: str, values: str, low: str
) -> tuple[str, str]:
    """Where keys and values of the positions from `low` on, a block's first, lie in the cache."""
    sizes = (shape.layer.key_elements, shape.layer.value_elements)
    heads = zip((keys, values), sizes, strict=True)
    here, there = (t.gep(head, t.mul(low, t.constant(n)), shape.element) for head, n in heads)
    return here, there


def _span(t: Text, shape: AttentionShape, rows: Rows) -> None:
    keys, values, weights = "%keys", "%values", "%weights"

    def begin(token: str) -> str:
        return begin_in_span(t, "%low", token, "%window")

    def end_of(token: str) -> str:
        return end_in_span(t, "%low", token)

    # All positions are counted from the start of the span from here on.
    last = t.binary("arith.subi", "%last", "%low")
    first = begin("%last")
    final = t.add("%last", t.constant(rows.tokens - 1))
    end = end_of(final)

    after = t.gep("%state", rows.count * shape.value_stride)
    scores = ["%queries", keys, first, end, last, "%window", "%softcap", "%slopes", weights, after]
    t.call(shape.part("scores", rows), scores_args(scores))
    t.call(f"softmax_{rows.name}", softmax_args([weights, first, end, after]))

    def one(token: str) -> None:
        """The sum of values of one token alone."""
        place = t.add("%last", token)
        low, high = begin(place), end_of(place)
        row = t.mul(token, t.constant(rows.heads))
        own = t.gep(weights, t.mul(row, t.constant(WEIGHTS_STRIDE)))
        sums = t.gep("%state", t.mul(row, t.constant(shape.value_stride)))
        call = [own, values, low, high, t.op("arith.constant false"), sums]
        t.call(shape.part("values", Rows(1, rows.heads)), values_args(call))

    def together() -> list[str]:
        ends_here = t.compare("ult", last, t.constant(KV_SPAN))
        call = [weights, values, t.constant(0), end_of("%last"), ends_here, "%state"]
        t.call(shape.part("values", rows), values_args(call))
        return []

    def apart() -> list[str]:
        with t.loop(t.constant(0), t.constant(rows.tokens), t.constant(1)) as token:
            one(token.index)
        return []

    if rows.tokens == 1:
        one(t.constant(0))
        return
    # Where a window begins inside the span, what a token must not see could reach it as a NaN.
    from_start = t.compare("eq", begin(final), t.constant(0))
    t.choose(from_start, together, apart, [])
