"""Attention of one token and KV head, span after span."""

from buddy_pipeline.compile.kernels.attention_ends import finish_args
from buddy_pipeline.compile.kernels.attention_place import (
    PART_ARGS,
    Place,
    from_head,
    place_of,
)
from buddy_pipeline.compile.kernels.attention_positions import first_position
from buddy_pipeline.compile.kernels.attention_queries import queries_args
from buddy_pipeline.compile.kernels.attention_shape import AttentionShape, Rows, state_bytes
from buddy_pipeline.compile.kernels.attention_span import cached_span, span_args
from buddy_pipeline.compile.manifest import KV_SPAN
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

_TILE_ARGS = [
    ("q", "!llvm.ptr"),
    ("ldq", "i64"),
    ("keys", "!llvm.ptr"),
    ("values", "!llvm.ptr"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("last", "i64"),
    ("window", "i64"),
    ("scale", "f32"),
    ("softcap", "f32"),
    ("sinks", "!llvm.ptr"),
    ("slopes", "!llvm.ptr"),
    ("scratch", "!llvm.ptr"),
]


_TOKEN_ARGS = [("token", "i64"), ("head", "i64"), *PART_ARGS]


def token_args(token: str, head: str) -> list[tuple[str, str]]:
    """Arguments of `one_token`, in a function that has those of a part."""
    values = [token, head, *(f"%{name}" for name, _ in PART_ARGS)]
    return [(v, kind) for v, (_, kind) in zip(values, _TOKEN_ARGS, strict=True)]


def emit_tile(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
    """`tile_1xH(…)`: H query heads of one token and KV head, span after span."""
    with t.function(f"tile_{rows.name}", _TILE_ARGS, private=True):
        span = t.constant(KV_SPAN)
        size = state_bytes(target, shape, rows.count)
        state, part = "%scratch", t.gep("%scratch", size, "i8")
        queries = t.gep("%scratch", 2 * size, "i8")
        weights = t.gep(queries, rows.count * shape.query_stride)
        first = first_position(t, "%last", "%window")
        low = t.mul(t.binary("arith.divui", first, span), span)
        end = t.add("%last", t.constant(1))

        def compute(start: str, to: str) -> None:
            cached = cached_span(t, shape, "%keys", "%values", start)
            values = [queries, *cached, start, "%last", "%window", "%softcap", "%slopes"]
            t.call(shape.part("span", rows), span_args([*values, to, weights]))

        copied = ["%q", "%ldq", "%scale", "%softcap", queries]
        t.call(f"queries_{rows.name}", queries_args(copied))
        compute(low, state)
        with t.loop(t.add(low, span), end, span) as later:
            compute(later.index, part)
            t.call(f"merge_{rows.count}", [(state, "!llvm.ptr"), (part, "!llvm.ptr")])
        t.call(f"finish_{rows.name}", finish_args([state, "%out", "%ldo", "%sinks"]))
        t.line("return")


def emit_token(t: Text, shape: AttentionShape, single: list[Rows]) -> None:
    """`one_token(token, head, …)`: all query heads of one token and KV head."""
    with t.function("one_token", _TOKEN_ARGS, private=True):
        at = place_of(t, shape, "%token", "%head")
        start = 0
        for rows in single:
            _call_tile(t, rows, from_head(t, shape, at, start))
            start += rows.heads
        t.line("return")


def _call_tile(t: Text, rows: Rows, at: Place) -> None:
    values = [at.q, "%ldq", at.keys, at.values, at.out, "%ldo", at.last]
    values += ["%window", "%scale", "%softcap", at.sinks, at.slopes, "%scratch"]
    kinds = [kind for _, kind in _TILE_ARGS]
    t.call(f"tile_{rows.name}", list(zip(values, kinds, strict=True)))
