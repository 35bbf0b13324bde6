"""Attention of many tokens: the team shares tiles of neighbouring tokens × query heads, each of
which walks its spans alone."""

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
from buddy_pipeline.compile.kernels.attention_span import span_args
from buddy_pipeline.compile.kernels.step import step_word
from buddy_pipeline.compile.manifest import KV_SPAN, StepWord
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


def emit_tile(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
    """`tile_NxH(…)`: N neighbouring tokens × H query heads of one KV head, span after span."""
    with t.function(f"tile_{rows.name}", _TILE_ARGS, private=True):
        span = t.constant(KV_SPAN)
        size = state_bytes(target, shape, rows.count)
        state, part = "%scratch", t.gep("%scratch", size, "i8")
        queries = t.gep("%scratch", 2 * size, "i8")
        weights = t.gep(queries, rows.count * shape.query_stride)
        first = first_position(t, "%last", "%window")
        low = t.mul(t.binary("arith.divui", first, span), span)
        end = t.add("%last", t.constant(rows.tokens))

        def compute(start: str, to: str) -> None:
            values = [queries, "%keys", "%values", start, "%last", "%window"]
            values += ["%softcap", "%slopes", to, weights]
            t.call(f"span_{rows.name}", span_args(values))

        copied = ["%q", "%ldq", "%scale", "%softcap", queries]
        t.call(f"queries_{rows.name}", queries_args(copied))
        compute(low, state)
        with t.loop(t.add(low, span), end, span) as later:
            compute(later.index, part)
            t.call(f"merge_{rows.count}", [(state, "!llvm.ptr"), (part, "!llvm.ptr")])
        t.call(f"finish_{rows.name}", finish_args([state, "%out", "%ldo", "%sinks"]))
        t.line("return")


_TOKEN_ARGS = [("token", "i64"), ("head", "i64"), *PART_ARGS]


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


def emit_units(t: Text, shape: AttentionShape, together: int) -> None:
    """`units(…)`: deals (group of neighbouring tokens, KV head) units round the team, head by head,
    so that a head's keys and values stay in the cache.

    Later tokens have more to read: dealing round keeps the team level. Neighbours go through one
    tile when they are one run of one slot that starts and ends in the same spans.
    """
    rows = Rows(together, shape.group)
    with t.function("units", PART_ARGS, private=True):
        one, width = t.constant(1), t.constant(together)
        tokens, team = step_word(t, StepWord.TOKENS), step_word(t, StepWord.TEAM)
        groups = t.binary("arith.ceildivui", tokens, width)
        units = t.mul(groups, "%kv_heads")
        with t.loop("%tid", units, team) as unit:
            group = t.binary("arith.remui", unit.index, groups)
            head = t.binary("arith.divui", unit.index, groups)
            first = t.mul(group, width)
            end = t.binary("arith.minui", t.add(first, width), tokens)

            def single(first: str = first, end: str = end, head: str = head) -> list[str]:
                with t.loop(first, end, one) as token:
                    values = [token.index, head, *[f"%{n}" for n, _ in PART_ARGS]]
                    kinds = [kind for _, kind in _TOKEN_ARGS]
                    t.call("one_token", list(zip(values, kinds, strict=True)))
                return []

            def joint(first: str = first, head: str = head) -> list[str]:
                at = place_of(t, shape, first, head)
                _call_tile(t, rows, at)
                return []

            if together == 1:
                single()
            else:
                t.choose(_is_run(t, first, end, together), joint, single, [])
        t.line("return")


def _is_run(t: Text, first: str, end: str, together: int) -> str:
    """Whether tokens first … first + together - 1 exist, are neighbours in one slot, and their
    attention begins in one span and ends in one."""
    positions = step_word(t, StepWord.POSITIONS, "!llvm.ptr")
    slots = step_word(t, StepWord.SLOTS, "!llvm.ptr")
    enough = t.compare("eq", t.binary("arith.subi", end, first), t.constant(together))

    def checks() -> list[str]:
        start = t.load(t.gep(positions, first, "i64"), "i64", 8)
        slot = t.load(t.gep(slots, first, "i64"), "i64", 8)
        same = t.op("arith.constant true")
        for offset in range(1, together):
            token = t.add(first, t.constant(offset))
            position = t.load(t.gep(positions, token, "i64"), "i64", 8)
            expected = t.add(start, t.constant(offset))
            for equal in (
                t.compare("eq", position, expected),
                t.compare("eq", t.load(t.gep(slots, token, "i64"), "i64", 8), slot),
            ):
                same = t.binary("arith.andi", same, equal, "i1")
        last = t.add(start, t.constant(together - 1))
        begins = [first_position(t, p, "%window") for p in (start, last)]
        for pair in (begins, [start, last]):
            parts = [t.binary("arith.divui", p, t.constant(KV_SPAN)) for p in pair]
            same = t.binary("arith.andi", same, t.compare("eq", *parts), "i1")
        return [same]

    return t.choose(enough, checks, lambda: [t.op("arith.constant false")], ["i1"])[0]
