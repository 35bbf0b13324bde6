"""Attention of few tokens with long caches: the team shares the spans of each."""

from buddy_pipeline.compile.kernels.attention_ends import finish_args
from buddy_pipeline.compile.kernels.attention_place import PART_ARGS, from_head, place_of
from buddy_pipeline.compile.kernels.attention_positions import first_position
from buddy_pipeline.compile.kernels.attention_queries import queries_args
from buddy_pipeline.compile.kernels.attention_shape import (
    AttentionShape,
    Rows,
    partial_bytes,
    state_bytes,
)
from buddy_pipeline.compile.kernels.attention_span import cached_span, span_args
from buddy_pipeline.compile.kernels.step import barrier, step_word
from buddy_pipeline.compile.manifest import KV_SPAN, StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


def emit_split(t: Text, target: Target, shape: AttentionShape, single: list[Rows]) -> None:
    """`split(…, spans)`: few tokens, long caches: the team shares (token, KV head, span) units and
    then merges each token's partial results in order."""
    size = partial_bytes(target, shape)
    with t.function("split", [*PART_ARGS, ("spans", "i64")], private=True):
        one, span = t.constant(1), t.constant(KV_SPAN)
        tokens, team = step_word(t, StepWord.TOKENS), step_word(t, StepWord.TEAM)
        partials = step_word(t, StepWord.PARTIALS, "!llvm.ptr")
        pairs = t.mul(tokens, "%kv_heads")

        def spans_of(last: str) -> tuple[str, str]:
            first = first_position(t, last, "%window")
            low = t.binary("arith.divui", first, span)
            return low, t.add(t.binary("arith.divui", last, span), one)

        with t.loop("%tid", t.mul(pairs, "%spans"), team) as unit:
            pair = t.binary("arith.divui", unit.index, "%spans")
            number = t.binary("arith.remui", unit.index, "%spans")
            token = t.binary("arith.divui", pair, "%kv_heads")
            head = t.binary("arith.remui", pair, "%kv_heads")
            at = place_of(t, shape, token, head)
            low, high = spans_of(at.last)
            inside = t.binary(
                "arith.andi",
                t.compare("uge", number, low),
                t.compare("ult", number, high),
                "i1",
            )
            with t.when(inside):
                state = t.gep(partials, t.mul(unit.index, t.constant(size)), "i8")
                start = 0
                for rows in single:
                    here = from_head(t, shape, at, start)
                    copied = [here.q, "%ldq", "%scale", "%softcap", "%scratch"]
                    t.call(f"queries_{rows.name}", queries_args(copied))
                    weights = t.gep("%scratch", rows.count * shape.query_stride)
                    low = t.mul(number, span)
                    cached = cached_span(t, shape, at.keys, at.values, low)
                    values = [
                        "%scratch",
                        *cached,
                        low,
                        at.last,
                        "%window",
                        "%softcap",
                        here.slopes,
                        state,
                        weights,
                    ]
                    t.call(shape.part("span", rows), span_args(values))
                    state = t.gep(state, state_bytes(target, shape, rows.count), "i8")
                    start += rows.heads
        barrier(t)
        with t.loop("%tid", pairs, team) as pair_loop:
            pair = pair_loop.index
            at = place_of(
                t,
                shape,
                t.binary("arith.divui", pair, "%kv_heads"),
                t.binary("arith.remui", pair, "%kv_heads"),
            )
            low, high = spans_of(at.last)
            base = t.mul(pair, "%spans")
            bytes_before = start = 0
            for rows in single:

                def part(number: str, before: int = bytes_before, base: str = base) -> str:
                    place = t.mul(t.add(base, number), t.constant(size))
                    return t.gep(t.gep(partials, place, "i8"), before, "i8")

                state = part(low)
                with t.loop(t.add(low, one), high, one) as later:
                    pointers = [(state, "!llvm.ptr"), (part(later.index), "!llvm.ptr")]
                    t.call(f"merge_{rows.count}", pointers)
                here = from_head(t, shape, at, start)
                ends = finish_args([state, here.out, "%ldo", here.sinks])
                t.call(f"finish_{rows.name}", ends)
                bytes_before += state_bytes(target, shape, rows.count)
                start += rows.heads
        t.line("return")
