"""Attention of many tokens: the team shares units of neighbouring tokens × a KV head's queries."""

import functools

from buddy_pipeline.compile.kernels.attention_ends import finish_args
from buddy_pipeline.compile.kernels.attention_place import (
    PART_ARGS,
    Place,
    from_head,
    place_of,
)
from buddy_pipeline.compile.kernels.attention_positions import first_position
from buddy_pipeline.compile.kernels.attention_queries import queries_args
from buddy_pipeline.compile.kernels.attention_run import RUN_TILES, run_args
from buddy_pipeline.compile.kernels.attention_shape import AttentionShape, Rows, state_bytes
from buddy_pipeline.compile.kernels.attention_span import cached_span, span_args
from buddy_pipeline.compile.kernels.step import step_word, thread_share
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


def emit_units(t: Text, shape: AttentionShape, rows: Rows | None) -> None:
    """`units(…)`: shares (token, KV head) out, head by head, so that a head's keys and values stay
    in the cache. Runs of neighbours in one slot go through tiles of `rows`, all else alone.

    Later tokens have more to read: of a head's tokens in blocks, two for each thread of the team, a
    thread gets one from the front and the same from the back, with the next head the next pair.
    """
    with t.function("units", PART_ARGS, private=True):
        zero, one, two = t.constant(0), t.constant(1), t.constant(2)
        tokens, team = step_word(t, StepWord.TOKENS), step_word(t, StepWord.TEAM)
        together = t.constant(rows.tokens if rows else 1)
        tiles, blocks = t.binary("arith.ceildivui", tokens, together), t.mul(team, two)
        with t.loop(zero, "%kv_heads", one) as head:
            front = t.binary("arith.remui", t.add("%tid", head.index), team)
            back = t.binary("arith.subi", t.binary("arith.subi", blocks, one), front)
            # Two rounds: the step leads from the one block to the other.
            apart = t.binary("arith.subi", back, front)
            with t.loop(front, t.add(back, one), apart) as block:
                low, high = thread_share(t, tiles, block.index, blocks)
                end = t.binary("arith.minui", t.mul(high, together), tokens)
                _unit(t, t.mul(low, together), end, head.index, rows)
        t.line("return")


def _unit(t: Text, first: str, end: str, head: str, rows: Rows | None) -> None:
    """Tokens first … end - 1, as many as can be in runs."""
    one = t.constant(1)
    with t.loop(first, end, one, [(first, "i64")]) as token:
        done = token.carried[0]

        def alone() -> list[str]:
            values = [token.index, head, *[f"%{n}" for n, _ in PART_ARGS]]
            kinds = [kind for _, kind in _TOKEN_ARGS]
            t.call("one_token", list(zip(values, kinds, strict=True)))
            return [t.add(token.index, one)]

        def begin() -> list[str]:
            if not rows:
                return alone()
            tiles = _tiles(t, token.index, end, rows.tokens)

            def joint() -> list[str]:
                t.call("run", run_args(token.index, tiles, head))
                return [t.add(token.index, t.mul(tiles, t.constant(rows.tokens)))]

            return t.choose(t.compare("ne", tiles, t.constant(0)), joint, alone, ["i64"])

        here = t.compare("eq", token.index, done)
        token.next = t.choose(here, begin, lambda: [done], ["i64"])


def _tiles(t: Text, first: str, end: str, together: int) -> str:
    """How many tiles of `together` tokens from `first` on, before `end`, are a run of one slot in
    which the tokens of a tile share their spans; at most RUN_TILES."""
    true, zero, width = t.op("arith.constant true"), t.constant(0), t.constant(together)
    most = t.add(first, t.constant(RUN_TILES * together))
    until = t.binary("arith.minui", end, most)
    until = t.binary("arith.subi", until, t.constant(together - 1))
    with t.loop(first, until, width, [(zero, "i64"), (true, "i1")]) as tile:
        count, going = tile.carried

        def checks() -> list[str]:
            return [_is_tile(t, first, tile.index, together)]

        going = t.choose(going, checks, lambda: [going], ["i1"])[0]
        one = t.op(f"arith.extui {going} : i1 to i64")
        tile.next = [t.add(count, one), going]
    return tile.results[0]


def _is_tile(t: Text, first: str, start: str, together: int) -> str:
    """Whether the `together` tokens from `start` on are neighbours in the slot of token `first`, as
    far behind it as they are in the step, and see the same spans."""
    positions = step_word(t, StepWord.POSITIONS, "!llvm.ptr")
    slots = step_word(t, StepWord.SLOTS, "!llvm.ptr")
    slot = t.load(t.gep(slots, first, "i64"), "i64", 8)
    begin = t.load(t.gep(positions, first, "i64"), "i64", 8)
    begin = t.add(begin, t.binary("arith.subi", start, first))
    conditions = []
    for offset in range(together):
        token = t.add(start, t.constant(offset))
        position = t.load(t.gep(positions, token, "i64"), "i64", 8)
        conditions.append(t.compare("eq", position, t.add(begin, t.constant(offset))))
        conditions.append(t.compare("eq", t.load(t.gep(slots, token, "i64"), "i64", 8), slot))
    final = t.add(begin, t.constant(together - 1))
    firsts = [first_position(t, position, "%window") for position in (begin, final)]
    for pair in (firsts, [begin, final]):
        spans = [t.binary("arith.divui", position, t.constant(KV_SPAN)) for position in pair]
        conditions.append(t.compare("eq", *spans))
    return functools.reduce(
        lambda left, right: t.binary("arith.andi", left, right, "i1"), conditions
    )
