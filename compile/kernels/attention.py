"""The attention kernel: causal attention of each token over its slot's KV cache, updated in place.

A slot's memory holds, layer after layer, keys `[kv head][block][key dim][KV_BLOCK]` (positions side
by side, so that scores of a block are vectors without horizontal sums) and values
`[kv head][position][value stride]`; in int8 each has its scales behind it (see `KvLayer`). Work
follows the actual length.

Spans of `KV_SPAN` fixed cache positions are separate partial results with a softmax of their own,
merged in order (flash-decoding). Who computes a span, alone or with the query's neighbours, changes
nothing in a query's own arithmetic, so results are bit-identical whatever the batch, the chunking
and the team.
"""

from functools import partial

from buddy_pipeline.compile.kernels.attention_ends import emit_finish, emit_merge
from buddy_pipeline.compile.kernels.attention_place import PART_ARGS, SIGNATURE
from buddy_pipeline.compile.kernels.attention_queries import emit_queries
from buddy_pipeline.compile.kernels.attention_run import emit_run, run_scratch_bytes
from buddy_pipeline.compile.kernels.attention_shape import (
    AttentionShape,
    Rows,
    runs_of,
    span_scratch_bytes,
    state_bytes,
    token_parts,
)
from buddy_pipeline.compile.kernels.attention_softmax import emit_softmax
from buddy_pipeline.compile.kernels.attention_span import emit_joint_span, emit_span
from buddy_pipeline.compile.kernels.attention_split import emit_split
from buddy_pipeline.compile.kernels.attention_store import emit_store
from buddy_pipeline.compile.kernels.attention_token import emit_tile, emit_token
from buddy_pipeline.compile.kernels.attention_units import emit_units
from buddy_pipeline.compile.kernels.attention_values import emit_values
from buddy_pipeline.compile.kernels.attention_widen import emit_widen
from buddy_pipeline.compile.kernels.step import barrier, declare_barrier, step_word
from buddy_pipeline.compile.manifest import KV_SPAN, SPLIT_UNITS, StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


def attention_scratch_bytes(target: Target, shape: AttentionShape) -> int:
    """Bytes of scratch per thread: a running and a partial state, and what a span needs; more where
    a thread computes a run of tokens."""
    most = max(rows.count for rows in token_parts(target, shape))
    single = 2 * state_bytes(target, shape, most) + span_scratch_bytes(shape, most)
    return max([single, *(run_scratch_bytes(target, shape, run) for run in runs_of(target, shape))])


def emit_attention(target: Target, shape: AttentionShape) -> str:
    """MLIR text of the module with the kernel for `shape`."""
    t = Text()
    declare_barrier(t)
    emit_store(t, target, shape)
    parts = token_parts(target, shape)
    single, runs = list(dict.fromkeys(parts)), runs_of(target, shape)
    all_rows = list(dict.fromkeys([*single, *(run.rows for run in runs)]))
    for rows in all_rows:
        emit_queries(t, target, shape, rows)
        emit_softmax(t, target, rows)
        emit_finish(t, target, shape, rows)
    for count in sorted({rows.count for rows in all_rows}):
        emit_merge(t, target, shape, count)
    for rows in single:
        emit_span(t, target, shape, rows)
        emit_tile(t, target, shape, rows)
    if shape != shape.widened and runs:
        emit_widen(t, target, shape)
        if runs[0].rows.tokens > 1:  # they are summed up alone where their windows begin
            emit_values(t, target, shape.widened, Rows(1, shape.group))
    for run in runs:
        emit_joint_span(t, target, run.reads, run.rows)
        emit_run(t, target, shape, run)
    emit_token(t, shape, parts)
    emit_units(t, runs)
    emit_split(t, target, shape, parts)
    _emit_entry(t, shape)
    return str(t)


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
        call = [(scratch if n == "scratch" else f"%{n}", kind) for n, kind in PART_ARGS]
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
