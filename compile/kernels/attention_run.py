"""Attention of a run of neighbouring tokens: span after span, in each of them tile after tile."""

from buddy_pipeline.compile.kernels.attention_ends import finish_args
from buddy_pipeline.compile.kernels.attention_place import PART_ARGS, Place, place_of
from buddy_pipeline.compile.kernels.attention_positions import first_position
from buddy_pipeline.compile.kernels.attention_queries import queries_args
from buddy_pipeline.compile.kernels.attention_shape import (
    AttentionShape,
    Run,
    span_scratch_bytes,
    state_bytes,
)
from buddy_pipeline.compile.kernels.attention_span import cached_span, joint_span_args
from buddy_pipeline.compile.kernels.attention_widen import (
    widen_args,
    widened_bytes,
    widened_key_bytes,
)
from buddy_pipeline.compile.manifest import KV_SPAN
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Tiles of a run at most: they share the work of widening a span. With 8 a prefill of 256 tokens on
#: bf16 or int8 took 2 to 5 % longer, with 32 up to 2 % less.
RUN_TILES = 16

_RUN_ARGS = [("first", "i64"), ("tiles", "i64"), ("head", "i64"), *PART_ARGS]


def run_args(first: str, tiles: str, head: str) -> list[tuple[str, str]]:
    """Arguments of `run`, in a function that has those of a part."""
    values = [first, tiles, head, *(f"%{name}" for name, _ in PART_ARGS)]
    return [(v, kind) for v, (_, kind) in zip(values, _RUN_ARGS, strict=True)]


def run_scratch_bytes(target: Target, shape: AttentionShape, run: Run) -> int:
    """Bytes of scratch: the states of all tiles, a partial one, what a span needs."""
    states = (RUN_TILES + 1) * state_bytes(target, shape, run.rows.count)
    return states + span_scratch_bytes(shape, run.rows.count) + widened_bytes(shape)


def emit_run(t: Text, target: Target, shape: AttentionShape, run: Run) -> None:
    """`run_NxH_CACHE(first, tiles, head, …)`: the query heads of a KV head, of `tiles` (at most
    RUN_TILES) tiles of tokens from `first` on, which are neighbours in one slot. No edge of a span
    may divide what the tokens of a tile see first or last."""
    with t.function(run.name, _RUN_ARGS, private=True):
        _Run(t, target, shape, run).write()
        t.line("return")


class _Run:
    """Writes the body of one `run` function."""

    def __init__(self, t: Text, target: Target, shape: AttentionShape, run: Run) -> None:
        self.t, self.shape, self.rows, self.reads = t, shape, run.rows, run.reads
        rows = run.rows
        self.size = state_bytes(target, shape, rows.count)
        self.part = t.gep("%scratch", RUN_TILES * self.size, "i8")
        self.queries = t.gep(self.part, self.size, "i8")
        self.weights = t.gep(self.queries, rows.count * shape.query_stride)
        self.wide = t.gep(self.queries, span_scratch_bytes(shape, rows.count), "i8")
        self.at: Place = place_of(t, shape, "%first", "%head")

    def write(self) -> None:
        t, at = self.t, self.at
        span = t.constant(KV_SPAN)
        end = t.add(at.last, t.mul("%tiles", t.constant(self.rows.tokens)))
        low = self._span_of(first_position(t, at.last, "%window"))
        with t.loop(low, end, span) as walk:
            places = t.binary("arith.minui", t.binary("arith.subi", end, walk.index), span)
            keys, values = self._memory(walk.index, places)
            with t.loop(t.constant(0), "%tiles", t.constant(1)) as tile:
                self._tile(tile.index, walk.index, keys, values)

    def _span_of(self, position: str) -> str:
        """Where the span of a position begins."""
        span = self.t.constant(KV_SPAN)
        return self.t.mul(self.t.binary("arith.divui", position, span), span)

    def _memory(self, low: str, places: str) -> tuple[str, str]:
        """Keys and values of a span as its tiles read them, the first `places` of them."""
        t, shape = self.t, self.shape
        cached = cached_span(t, shape, self.at.keys, self.at.values, low)
        if shape == self.reads:
            return cached
        keys, values = self.wide, t.gep(self.wide, widened_key_bytes(shape), "i8")
        t.call("widen", widen_args([*cached, places, keys, values]))
        return keys, values

    def _tile(self, number: str, low: str, keys: str, values: str) -> None:
        """What a tile sees of the span at `low`, if anything; after its last one, its outputs."""
        t, at = self.t, self.at
        tokens = t.mul(number, t.constant(self.rows.tokens))
        last = t.add(at.last, tokens)
        begin = self._span_of(first_position(t, last, "%window"))
        final = self._span_of(last)
        edges = (t.compare("sle", begin, low), t.compare("sle", low, final))
        with t.when(t.binary("arith.andi", *edges, "i1")):
            # What is whole after one span stays where it is made, in the first cache.
            own = t.gep("%scratch", t.mul(number, t.constant(self.size)), "i8")
            state = t.select(t.compare("eq", begin, final), self.part, own, "!llvm.ptr")
            later = t.compare("ne", low, begin)
            to = t.select(later, self.part, state, "!llvm.ptr")
            self._span(tokens, low, last, keys, values, to)
            with t.when(later):
                merged = [(state, "!llvm.ptr"), (self.part, "!llvm.ptr")]
                t.call(f"merge_{self.rows.count}", merged)
            with t.when(t.compare("eq", low, final)):
                out = t.gep(at.out, t.mul(tokens, "%ldo"))
                call = finish_args([state, out, "%ldo", at.sinks])
                t.call(f"finish_{self.rows.name}", call)

    def _span(self, tokens: str, low: str, last: str, keys: str, values: str, to: str) -> None:
        """The partial result of the tile that begins `tokens` tokens behind the run's first."""
        t, at, rows = self.t, self.at, self.rows
        q, out = t.gep(at.q, t.mul(tokens, "%ldq")), t.gep(at.out, t.mul(tokens, "%ldo"))
        following = t.gep(q, t.mul(t.constant(rows.tokens), "%ldq"))
        copy = [q, "%ldq", "%scale", "%softcap", self.queries]
        t.call(f"queries_{rows.name}", queries_args(copy))
        call = [self.queries, keys, values, low, last, "%window", "%softcap", at.slopes, to]
        call += [self.weights, following, "%ldq", out, "%ldo"]
        t.call(self.reads.part("span", rows), joint_span_args(call))
