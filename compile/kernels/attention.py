"""The attention kernel: causal attention of each token over its slot's KV cache, updated in place.

A slot's memory holds, layer after layer, keys `[kv head][block][key dim][KV_BLOCK]` (positions side
by side, so that scores of a block are vectors without horizontal sums) and values
`[kv head][position][value stride]`; in int8 each has its scales behind it (see `KvLayer`). Work
follows the actual length.

A query walks blocks at fixed cache positions with a running softmax (Milakov and Gimelshein 2018);
spans of `KV_SPAN` positions are separate partial results, merged in order (flash-decoding). Who
computes a span, alone or with the query's neighbours, changes nothing in a query's own arithmetic,
so results are bit-identical whatever the batch, the chunking and the team.
"""

from dataclasses import dataclass, replace
from functools import partial

from buddy_pipeline.compile.kernels.attention_ends import emit_finish, emit_merge, finish_args
from buddy_pipeline.compile.kernels.attention_positions import first_position
from buddy_pipeline.compile.kernels.attention_scores import queries_args
from buddy_pipeline.compile.kernels.attention_shape import (
    AttentionShape,
    Rows,
    rows_of,
    span_scratch_bytes,
    state_bytes,
    token_parts,
)
from buddy_pipeline.compile.kernels.attention_span import emit_spans, span_args
from buddy_pipeline.compile.kernels.attention_store import emit_store, layer_base
from buddy_pipeline.compile.kernels.step import barrier, declare_barrier, step_word
from buddy_pipeline.compile.manifest import KV_SPAN, SPLIT_UNITS, StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

SIGNATURE = [
    ("q", "!llvm.ptr"),
    ("ldq", "i64"),
    ("k", "!llvm.ptr"),
    ("ldk", "i64"),
    ("v", "!llvm.ptr"),
    ("ldv", "i64"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("kv_heads", "i64"),
    ("kv_offset", "i64"),
    ("scale", "f32"),
    ("window", "i64"),
    ("softcap", "f32"),
    ("sinks", "!llvm.ptr"),
    ("slopes", "!llvm.ptr"),
    ("step", "!llvm.ptr"),
    ("tid", "i64"),
]


def attention_scratch_bytes(target: Target, shape: AttentionShape) -> int:
    """Bytes of scratch per thread: a running and a partial state, and what a span needs."""
    most = max(rows.count for rows in rows_of(target, shape))
    return 2 * state_bytes(target, shape, most) + span_scratch_bytes(shape, most)


def partial_bytes(target: Target, shape: AttentionShape) -> int:
    """Bytes of one span's partial result of one token and KV head."""
    return sum(state_bytes(target, shape, rows.heads) for rows in token_parts(target, shape))


def emit_attention(target: Target, shape: AttentionShape) -> str:
    """MLIR text of the module with the kernel for `shape`."""
    t = Text()
    declare_barrier(t)
    all_rows = rows_of(target, shape)
    emit_store(t, target, shape)
    emit_spans(t, target, shape, all_rows)
    for rows in all_rows:
        emit_finish(t, target, shape, rows)
    for count in sorted({rows.count for rows in all_rows}):
        emit_merge(t, target, shape, count)
    for rows in all_rows:
        _emit_tile(t, target, shape, rows)
    single = token_parts(target, shape)
    together = max((rows.tokens for rows in all_rows), default=1)
    _emit_token(t, shape, single)
    _emit_units(t, shape, together)
    _emit_split(t, target, shape, single)
    _emit_entry(t, shape)
    return str(t)


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


def _emit_tile(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
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


_HEAD_ARGS = [
    ("token", "i64"),
    ("head", "i64"),
    *[(n, k) for n, k in SIGNATURE if n not in ("k", "ldk", "v", "ldv", "tid")],
    ("scratch", "!llvm.ptr"),
]


@dataclass(frozen=True)
class _Place:
    """Addresses that belong to one token and KV head."""

    q: str
    keys: str
    values: str
    out: str
    last: str
    sinks: str
    slopes: str


def _place(t: Text, shape: AttentionShape, token: str, head: str) -> _Place:
    """Finds a token's queries, its slot's keys and values, and its outputs."""
    positions = step_word(t, StepWord.POSITIONS, "!llvm.ptr")
    slots = step_word(t, StepWord.SLOTS, "!llvm.ptr")
    last = t.load(t.gep(positions, token, "i64"), "i64", 8)
    slot = t.load(t.gep(slots, token, "i64"), "i64", 8)
    element = shape.element
    layer, capacity = layer_base(t, shape, slot)
    key_head = t.mul(capacity, t.constant(shape.layer.key_elements))
    values = t.gep(layer, t.mul(key_head, "%kv_heads"), element)
    value_head = t.mul(capacity, t.constant(shape.layer.value_elements))
    q = t.gep("%q", t.mul(token, "%ldq"))
    out = t.gep("%out", t.mul(token, "%ldo"))
    first_head = t.mul(head, t.constant(shape.group))
    return _Place(
        q=t.gep(q, t.mul(head, t.constant(shape.group * shape.key))),
        keys=t.gep(layer, t.mul(head, key_head), element),
        values=t.gep(values, t.mul(head, value_head), element),
        out=t.gep(out, t.mul(head, t.constant(shape.group * shape.value))),
        last=last,
        sinks=t.gep("%sinks", first_head) if shape.sinks else "%sinks",
        slopes=t.gep("%slopes", first_head) if shape.slopes else "%slopes",
    )


def _from_head(t: Text, shape: AttentionShape, at: _Place, start: int) -> _Place:
    """The place of the query heads from `start` on."""
    return replace(
        at,
        q=t.gep(at.q, start * shape.key),
        out=t.gep(at.out, start * shape.value),
        sinks=t.gep(at.sinks, start) if shape.sinks else at.sinks,
        slopes=t.gep(at.slopes, start) if shape.slopes else at.slopes,
    )


def _emit_token(t: Text, shape: AttentionShape, single: list[Rows]) -> None:
    """`one_token(token, head, …)`: all query heads of one token and KV head."""
    with t.function("one_token", _HEAD_ARGS, private=True):
        at = _place(t, shape, "%token", "%head")
        start = 0
        for rows in single:
            _call_tile(t, rows, _from_head(t, shape, at, start))
            start += rows.heads
        t.line("return")


def _call_tile(t: Text, rows: Rows, at: _Place) -> None:
    values = [at.q, "%ldq", at.keys, at.values, at.out, "%ldo", at.last]
    values += ["%window", "%scale", "%softcap", at.sinks, at.slopes, "%scratch"]
    kinds = [kind for _, kind in _TILE_ARGS]
    t.call(f"tile_{rows.name}", list(zip(values, kinds, strict=True)))


def _emit_units(t: Text, shape: AttentionShape, together: int) -> None:
    """`units(…)`: deals (group of neighbouring tokens, KV head) units round the team, head by head,
    so that a head's keys and values stay in the cache.

    Later tokens have more to read: dealing round keeps the team level. Neighbours go through one
    tile when they are one run of one slot that starts and ends in the same spans.
    """
    args = [*[a for a in _HEAD_ARGS if a[0] not in ("token", "head")], ("tid", "i64")]
    rows = Rows(together, shape.group)
    with t.function("units", args, private=True):
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
                    values = [token.index, head, *[f"%{n}" for n, _ in _HEAD_ARGS[2:]]]
                    kinds = [kind for _, kind in _HEAD_ARGS]
                    t.call("one_token", list(zip(values, kinds, strict=True)))
                return []

            def joint(first: str = first, head: str = head) -> list[str]:
                at = _place(t, shape, first, head)
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


def _emit_split(t: Text, target: Target, shape: AttentionShape, single: list[Rows]) -> None:
    """`split(…, spans)`: few tokens, long caches: the team shares (token, KV head, span) units and
    then merges each token's partial results in order."""
    args = [*[a for a in _HEAD_ARGS if a[0] not in ("token", "head")], ("tid", "i64")]
    args.append(("spans", "i64"))
    size = partial_bytes(target, shape)
    with t.function("split", args, private=True):
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
            at = _place(t, shape, token, head)
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
                    here = _from_head(t, shape, at, start)
                    copied = [here.q, "%ldq", "%scale", "%softcap", "%scratch"]
                    t.call(f"queries_{rows.name}", queries_args(copied))
                    weights = t.gep("%scratch", rows.count * shape.query_stride)
                    values = ["%scratch", at.keys, at.values, t.mul(number, span), at.last]
                    values += ["%window", "%softcap", here.slopes, state, weights]
                    t.call(f"span_{rows.name}", span_args(values))
                    state = t.gep(state, state_bytes(target, shape, rows.count), "i8")
                    start += rows.heads
        barrier(t)
        with t.loop("%tid", pairs, team) as pair_loop:
            pair = pair_loop.index
            at = _place(
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
                here = _from_head(t, shape, at, start)
                ends = finish_args([state, here.out, "%ldo", here.sinks])
                t.call(f"finish_{rows.name}", ends)
                bytes_before += state_bytes(target, shape, rows.count)
                start += rows.heads
        t.line("return")


def _emit_entry(t: Text, shape: AttentionShape) -> None:
    """The kernel: stores this step's keys and values, then shares the work out."""
    kinds = dict(SIGNATURE)
    with t.function(shape.name, SIGNATURE):
        stored = ["k", "ldk", "v", "ldv", "kv_heads", "kv_offset", "step", "tid"]
        t.call("store_kv", [(f"%{n}", kinds[n]) for n in stored])
        barrier(t)
        zero, one = t.constant(0), t.constant(1)
        tokens, team = step_word(t, StepWord.TOKENS), step_word(t, StepWord.TEAM)
        scratch = step_word(t, StepWord.SCRATCH, "!llvm.ptr")
        scratch = t.gep(scratch, t.mul("%tid", step_word(t, StepWord.SCRATCH_STRIDE)), "i8")
        few = t.compare("ult", t.mul(tokens, "%kv_heads"), t.mul(team, t.constant(SPLIT_UNITS)))
        several = t.compare("ugt", team, one)
        few = t.binary("arith.andi", few, several, "i1")

        def longest() -> list[str]:
            positions = step_word(t, StepWord.POSITIONS, "!llvm.ptr")
            with t.loop(zero, tokens, one, [(zero, "i64")]) as token:
                last = t.load(t.gep(positions, token.index, "i64"), "i64", 8)
                spans = t.add(t.binary("arith.divui", last, t.constant(KV_SPAN)), one)
                token.next = [t.binary("arith.maxui", token.carried[0], spans)]
            return token.results

        spans = t.choose(few, longest, lambda: [one], ["i64"])[0]
        names = [n for n, _ in _HEAD_ARGS[2:] if n != "scratch"]
        call = [(f"%{n}", kinds[n]) for n in names]
        call += [(scratch, "!llvm.ptr"), ("%tid", "i64")]
        t.choose(
            t.compare("ugt", spans, one),
            partial(_call, t, "split", [*call, (spans, "i64")]),
            partial(_call, t, "units", call),
            [],
        )
        t.line("return")


def _call(t: Text, name: str, args: list[tuple[str, str]]) -> list[str]:
    """A call as the branch of a `choose` without results."""
    t.call(name, args)
    return []
