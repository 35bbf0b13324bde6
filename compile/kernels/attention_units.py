"""Attention of many tokens: how the team shares them out, and which of them go together."""

import functools

from buddy_pipeline.compile.kernels.attention_place import PART_ARGS
from buddy_pipeline.compile.kernels.attention_positions import first_position
from buddy_pipeline.compile.kernels.attention_run import RUN_TILES, run_args
from buddy_pipeline.compile.kernels.attention_shape import Run
from buddy_pipeline.compile.kernels.attention_token import token_args
from buddy_pipeline.compile.kernels.step import step_word, thread_share
from buddy_pipeline.compile.manifest import KV_SPAN, StepWord
from buddy_pipeline.compile.mlir_text import Text


def emit_units(t: Text, runs: list[Run]) -> None:
    """`units(…)`: shares (token, KV head) out, head by head, so that a head's keys and values stay
    in the cache. Neighbours in one slot are computed as `runs`, all else alone.

    Later tokens have more to read: of a head's tokens in blocks, two for each thread of the team, a
    thread gets one from the front and the same from the back, with the next head the next pair.
    """
    with t.function("units", PART_ARGS, private=True):
        zero, one, two = t.constant(0), t.constant(1), t.constant(2)
        tokens, team = step_word(t, StepWord.TOKENS), step_word(t, StepWord.TEAM)
        together = t.constant(runs[0].rows.tokens if runs else 1)
        tiles, blocks = t.binary("arith.ceildivui", tokens, together), t.mul(team, two)
        with t.loop(zero, "%kv_heads", one) as head:
            front = t.binary("arith.remui", t.add("%tid", head.index), team)
            back = t.binary("arith.subi", t.binary("arith.subi", blocks, one), front)
            # Two rounds: the step leads from the one block to the other.
            apart = t.binary("arith.subi", back, front)
            with t.loop(front, t.add(back, one), apart) as block:
                low, high = thread_share(t, tiles, block.index, blocks)
                end = t.binary("arith.minui", t.mul(high, together), tokens)
                _unit(t, t.mul(low, together), end, head.index, runs)
        t.line("return")


def _unit(t: Text, first: str, end: str, head: str, runs: list[Run]) -> None:
    """Tokens first … end - 1, as many as can be in runs."""
    one = t.constant(1)
    with t.loop(first, end, one, [(first, "i64")]) as token:
        done = token.carried[0]

        def alone() -> list[str]:
            t.call("one_token", token_args(token.index, head))
            return [t.add(token.index, one)]

        def longest(tiles: str, runs: list[Run]) -> list[str]:
            """The first of `runs` that is not too long for so many tiles."""
            if not runs:
                return alone()
            run, *shorter = runs

            def together() -> list[str]:
                t.call(run.name, run_args(token.index, tiles, head))
                return [t.add(token.index, t.mul(tiles, t.constant(run.rows.tokens)))]

            enough = t.compare("uge", tiles, t.constant(run.fewest))
            return t.choose(enough, together, lambda: longest(tiles, shorter), ["i64"])

        def begin() -> list[str]:
            if not runs:
                return alone()
            return longest(_tiles(t, token.index, end, runs[0].rows.tokens), runs)

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
