"""Scores of attention: dot products of a tile's queries with the keys of one span."""

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.attention_cached import key_scales, widened
from buddy_pipeline.compile.kernels.attention_seen import Seen
from buddy_pipeline.compile.kernels.attention_shape import (
    WEIGHTS_STRIDE,
    AttentionShape,
    Rows,
)
from buddy_pipeline.compile.manifest import KV_BLOCK, KV_SCALE_BLOCK
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Rows × elements of the key dimension in one round of the inner loop, at least one element of each
#: row: of a large tile's rounds LLVM would load more keys at once than there are registers.
_UNROLL = 4

_SCORES_ARGS = [
    ("queries", "!llvm.ptr"),
    ("keys", "!llvm.ptr"),
    ("first", "i64"),
    ("end", "i64"),
    ("last", "i64"),
    ("window", "i64"),
    ("softcap", "f32"),
    ("slopes", "!llvm.ptr"),
    ("to", "!llvm.ptr"),
    ("maxima", "!llvm.ptr"),
]


def scores_args(values: list[str]) -> list[tuple[str, str]]:
    """Arguments of a `scores` function with their types."""
    return [(v, kind) for v, (_, kind) in zip(values, _SCORES_ARGS, strict=True)]


def emit_scores(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
    """`scores_NxH_CACHE(queries, keys, first, end, last, …, to, maxima)`: scores, in powers of two,
    of all rows with the positions first … end - 1 of a span, and some around them.

    `last` is the place of the first token, `to` has a row of WEIGHTS_STRIDE floats for each row.
    What a token does not see has a score of -∞. `maxima` gets each row's greatest scores, lane by
    lane, at least the lowest finite number: where all are -∞ their weights are then 0, not NaN.
    """
    with t.function(shape.part("scores", rows), _SCORES_ARGS, private=True):
        _Scores(t, target, shape, rows).write()
        t.line("return")


class _Scores:
    """Writes the body of one `scores` function."""

    def __init__(self, t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
        self.t, self.target, self.shape, self.rows = t, target, shape, rows
        self.lanes = target.lanes
        self.vector = f"vector<{self.lanes}xf32>"

    def write(self) -> None:
        """Register tiles of all rows × `panel_vectors` vectors of positions, and where the span's
        positions end in the first half of one, a tile of half the width."""
        t, vectors = self.t, self.target.panel_vectors
        one = t.constant(1)
        least = t.op(f"arith.constant dense<0xFF7FFFFF> : {self.vector}")
        for r in range(self.rows.count):
            t.store(least, self._maximum(r), self.vector)
        wide, half = t.constant(vectors * self.lanes), t.constant(vectors // 2 * self.lanes)
        start = t.mul(t.binary("arith.divui", "%first", wide), wide)
        halves = t.binary("arith.ceildivui", "%end", half)
        whole = t.mul(t.binary("arith.shrui", halves, one), wide)
        with t.loop(start, whole, wide) as place:
            self._tile(place.index, vectors)
        with t.when(t.compare("ne", t.binary("arith.andi", halves, one), t.constant(0))):
            self._tile(whole, vectors // 2)

    def _tile(self, start: str, vectors: int) -> None:
        """Scores of `vectors` vectors of positions from place `start` on."""
        t, shape, element = self.t, self.shape, self.shape.element
        block = t.constant(KV_BLOCK)
        number = t.binary("arith.divui", start, block)
        inside = t.binary("arith.remui", start, block)
        size = t.constant(shape.layer.key_elements * KV_BLOCK)
        whole_block = t.gep("%keys", t.mul(number, size), element)
        keys = t.gep(whole_block, inside, element)
        places = [(r, j) for r in range(self.rows.count) for j in range(vectors)]
        chains = [t.constant(0.0, self.vector)] * len(places)
        part = KV_SCALE_BLOCK if shape.is_int8 else shape.key
        for low in range(0, shape.key, part):
            scales = key_scales(t, self.target, shape, whole_block, inside, low // part, vectors)
            high = min(low + part, shape.key)
            unroll = max(1, _UNROLL // self.rows.count) if shape.element == "f32" else 1
            whole = low + (high - low) // unroll * unroll
            for begin, end, step in ((low, whole, unroll), (whole, high, 1)):
                if begin < end:
                    chains = self._depths(keys, chains, scales, begin, end, step)
        scores = [
            self._finished(chain, r, start, j) for (r, j), chain in zip(places, chains, strict=True)
        ]
        seen = Seen(t, self.lanes, self.rows, "%last", "%window")
        self._keep(start, vectors, seen.alone(scores, start, vectors))

    def _keep(self, start: str, vectors: int, scores: list[str]) -> None:
        """Stores a tile's scores, and what they make of the rows' maxima."""
        t, vector = self.t, self.vector
        to = t.gep("%to", start)
        for r in range(self.rows.count):
            most = t.load(self._maximum(r), vector)
            for j, score in enumerate(scores[r * vectors : (r + 1) * vectors]):
                t.store(score, t.gep(to, r * WEIGHTS_STRIDE + j * self.lanes), vector)
                most = vm.maximum(t, score, most, vector)
            t.store(most, self._maximum(r), vector)

    def _maximum(self, row: int) -> str:
        """Where a row's greatest scores are."""
        return self.t.gep("%maxima", row * self.lanes)

    def _depths(
        self, keys: str, chains: list[str], scales: list[str | None], low: int, high: int, step: int
    ) -> list[str]:
        """Chains carried on over elements low … high - 1 of the key dimension."""
        t, shape, vectors = self.t, self.shape, len(scales)
        begun = [(chain, self.vector) for chain in chains]
        with t.loop(t.constant(low), t.constant(high), t.constant(step), begun) as depth:
            chains = depth.carried
            row = t.gep(keys, t.mul(depth.index, t.constant(KV_BLOCK)), shape.element)
            queries = t.gep("%queries", depth.index)
            for d in range(step):
                loaded = [
                    widened(
                        t,
                        self.target,
                        shape,
                        t.gep(row, d * KV_BLOCK + j * self.lanes, shape.element),
                        scales[j],
                    )
                    for j in range(vectors)
                ]
                following = []
                for r in range(self.rows.count):
                    scalar = t.load(t.gep(queries, r * shape.query_stride + d), "f32")
                    query = t.broadcast(scalar, self.vector)
                    for j in range(vectors):
                        chain = chains[r * vectors + j]
                        following.append(t.fma(query, loaded[j], chain, self.vector))
                chains = following
            depth.next = chains
        return depth.results

    def _finished(self, score: str, row: int, start: str, number: int) -> str:
        """A score in powers of two, from the product of query and key."""
        t, shape, vector = self.t, self.shape, self.vector
        token, head = divmod(row, self.rows.heads)
        log2_e = t.constant(vm.LOG2_E, "f32")
        if shape.softcap:
            cap = t.broadcast(t.binary("arith.mulf", "%softcap", log2_e, "f32"), vector)
            score = t.binary("arith.mulf", vm.tanh(t, score, vm.Lanes(self.lanes)), cap, vector)
        if shape.slopes:
            slope = t.binary("arith.mulf", t.load(t.gep("%slopes", head), "f32"), log2_e, "f32")
            distance = self._distance(token, start, number)
            score = t.fma(t.broadcast(slope, vector), distance, score, vector)
        return score

    def _distance(self, token: int, start: str, number: int) -> str:
        """Positions of keys − a token's, in f32."""
        t, lanes = self.t, self.lanes
        whole = f"vector<{lanes}xi32>"
        here = ", ".join(map(str, range(number * lanes, (number + 1) * lanes)))
        places = t.op(f"arith.constant dense<[{here}]> : {whole}")
        away = t.binary("arith.subi", start, t.add("%last", t.constant(token)))
        away = t.broadcast(t.op(f"arith.trunci {away} : i64 to i32"), whole, "i32")
        away = t.binary("arith.addi", places, away, whole)
        return t.op(f"arith.sitofp {away} : {whole} to {self.vector}")
