"""The inner piece of attention: what some queries see of one span of positions.

Scores of the whole span are computed first, then their softmax, then the sum of values: a row's
maximum is known before its first exponential, and sums of values stay in registers from one end of
the span to the other. Scores count in powers of two: queries are multiplied by log2 e beforehand.
"""

from buddy_pipeline.compile.kernels.attention_positions import begin_in_span, end_in_span
from buddy_pipeline.compile.kernels.attention_scores import emit_scores, scores_args
from buddy_pipeline.compile.kernels.attention_shape import (
    WEIGHTS_STRIDE,
    AttentionShape,
    Rows,
)
from buddy_pipeline.compile.kernels.attention_softmax import softmax_args
from buddy_pipeline.compile.kernels.attention_values import emit_values, values_args
from buddy_pipeline.compile.manifest import KV_SPAN
from buddy_pipeline.compile.mlir_text import CACHE_LINE, Text
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
_JOINT_ARGS = [
    *_SPAN_ARGS,
    ("next", "!llvm.ptr"),
    ("ldq", "i64"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
]


def span_args(values: list[str]) -> list[tuple[str, str]]:
    """Arguments of a span function of one token with their types."""
    return [(v, kind) for v, (_, kind) in zip(values, _SPAN_ARGS, strict=True)]


def joint_span_args(values: list[str]) -> list[tuple[str, str]]:
    """Arguments of a span function of several tokens with their types."""
    return [(v, kind) for v, (_, kind) in zip(values, _JOINT_ARGS, strict=True)]


def emit_span(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
    """`span_1xH_CACHE(queries, keys, values, low, last, window, …, state, weights)`: the partial
    result of the token at position `last` × H heads over the cache positions
    low … low + KV_SPAN - 1, of which it must see some, with their `keys` and `values`."""
    emit_scores(t, target, shape, rows)
    emit_values(t, target, shape, rows)
    with t.function(shape.part("span", rows), _SPAN_ARGS, private=True):
        _score(t, shape, rows)
        _weigh(t, shape, rows)
        _sum_of_one(t, shape, rows, t.constant(0))
        t.line("return")


def emit_joint_span(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
    """`span_NxH_CACHE(…, next, ldq, out, ldo)`: the same of N tokens at positions last, last + 1,
    …, each of which must see some positions.

    `next` are the next tile's queries and `out` where this one's outputs will be: runs of a few
    lines, which hardware does not foresee. They are asked for before what is computed in the first
    cache alone, at the tile's last span (2 % of a prefill of 256 tokens; beside scores, which wait
    for keys, it was none).
    """
    emit_scores(t, target, shape, rows)
    emit_values(t, target, shape, rows)
    with t.function(shape.part("span", rows), _JOINT_ARGS, private=True):
        _score(t, shape, rows)
        with t.when(_ends_here(t)):
            _ask(t, rows, "%next", "%ldq", shape.key, write=False)
        _weigh(t, shape, rows)
        with t.when(_ends_here(t)):
            _ask(t, rows, "%out", "%ldo", shape.value, write=True)
        _sum(t, shape, rows)
        t.line("return")


def cached_span(
    t: Text, shape: AttentionShape, keys: str, values: str, low: str
) -> tuple[str, str]:
    """Where keys and values of the positions from `low` on, a block's first, lie in the cache."""
    sizes = (shape.layer.key_elements, shape.layer.value_elements)
    heads = zip((keys, values), sizes, strict=True)
    here, there = (t.gep(head, t.mul(low, t.constant(n)), shape.element) for head, n in heads)
    return here, there


def _seen(t: Text, rows: Rows) -> tuple[str, str]:
    """The first place of the span that some token sees, and one more than the last."""
    final = t.add("%last", t.constant(rows.tokens - 1))
    return begin_in_span(t, "%low", "%last", "%window"), end_in_span(t, "%low", final)


def _ends_here(t: Text) -> str:
    """Whether the span is the last that the tokens see."""
    place = t.binary("arith.subi", "%last", "%low")
    return t.compare("ult", place, t.constant(KV_SPAN))


def _maxima(t: Text, shape: AttentionShape, rows: Rows) -> str:
    """Where the state has the maxima of its rows, and behind them the sums of their weights."""
    return t.gep("%state", rows.count * shape.value_stride)


def _score(t: Text, shape: AttentionShape, rows: Rows) -> None:
    first, end = _seen(t, rows)
    last = t.binary("arith.subi", "%last", "%low")
    call = ["%queries", "%keys", first, end, last, "%window", "%softcap", "%slopes", "%weights"]
    t.call(shape.part("scores", rows), scores_args([*call, _maxima(t, shape, rows)]))


def _weigh(t: Text, shape: AttentionShape, rows: Rows) -> None:
    call = ["%weights", *_seen(t, rows), _maxima(t, shape, rows)]
    t.call(f"softmax_{rows.name}", softmax_args(call))


def _sum(t: Text, shape: AttentionShape, rows: Rows) -> None:
    """Sums of values of all tokens together. Where a window begins inside the span, of each alone:
    what a token must not see could reach it as a NaN."""
    final = t.add("%last", t.constant(rows.tokens - 1))
    from_start = t.compare("eq", begin_in_span(t, "%low", final, "%window"), t.constant(0))

    def together() -> list[str]:
        high = end_in_span(t, "%low", "%last")
        call = ["%weights", "%values", t.constant(0), high, _ends_here(t), "%state"]
        t.call(shape.part("values", rows), values_args(call))
        return []

    def apart() -> list[str]:
        with t.loop(t.constant(0), t.constant(rows.tokens), t.constant(1)) as token:
            _sum_of_one(t, shape, rows, token.index)
        return []

    t.choose(from_start, together, apart, [])


def _sum_of_one(t: Text, shape: AttentionShape, rows: Rows, token: str) -> None:
    """The sum of values of one token alone."""
    place = t.add("%last", token)
    low, high = begin_in_span(t, "%low", place, "%window"), end_in_span(t, "%low", place)
    row = t.mul(token, t.constant(rows.heads))
    weights = t.gep("%weights", t.mul(row, t.constant(WEIGHTS_STRIDE)))
    sums = t.gep("%state", t.mul(row, t.constant(shape.value_stride)))
    call = [weights, "%values", low, high, t.op("arith.constant false"), sums]
    t.call(shape.part("values", Rows(1, rows.heads)), values_args(call))


def _ask(t: Text, rows: Rows, row: str, stride: str, size: int, write: bool) -> None:
    """Asks for rows of a tile's queries or outputs, `size` elements a head."""
    starts = [row]
    for _ in range(1, rows.tokens):
        starts.append(t.gep(starts[-1], stride))
    line = t.constant(CACHE_LINE // 4)
    with t.loop(t.constant(0), t.constant(rows.heads * size), line) as column:
        for start in starts:
            t.prefetch(t.gep(start, column.index), write=write)
