"""The inner piece of attention: one span of positions."""

from dataclasses import dataclass

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.step import step_word
from buddy_pipeline.compile.manifest import (
    KV_BLOCK,
    KV_SCALE_BLOCK,
    KV_SPAN,
    KvLayer,
    StepWord,
)
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


@dataclass(frozen=True)
class AttentionShape:
    """What the code of an attention kernel depends on."""

    key: int  # elements of a query or key head
    value: int  # elements of a value head
    group: int  # query heads that share a KV head
    softcap: bool
    cache: str  # type of cached elements: "f32", "bf16", "f16" or "int8"
    sinks: bool = False  # each head has a key that everyone sees and whose value is zero
    slopes: bool = False  # each head's scores fall with the distance of the key (ALiBi)

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        cap = "_cap" if self.softcap else ""
        more = ("_sinks" if self.sinks else "") + ("_slopes" if self.slopes else "")
        return f"bp_attention_{self.cache}_k{self.key}_v{self.value}_g{self.group}{cap}{more}"

    @property
    def layer(self) -> KvLayer:
        """How one KV head lies in the cache."""
        return KvLayer(1, self.key, self.value, self.cache)

    @property
    def value_stride(self) -> int:
        """Numbers of one cached value row."""
        return self.layer.value_stride

    @property
    def element(self) -> str:
        """The MLIR type of cached elements."""
        return "i8" if self.is_int8 else self.cache

    @property
    def is_int8(self) -> bool:
        """Whether cached elements are bytes with scales."""
        return self.cache == "int8"


@dataclass(frozen=True)
class Rows:
    """The queries of one register tile: neighbouring tokens × query heads of one KV head."""

    tokens: int
    heads: int

    @property
    def name(self) -> str:
        """Part of the symbols that depend on it."""
        return f"{self.tokens}x{self.heads}"

    @property
    def count(self) -> int:
        """Query rows in all."""
        return self.tokens * self.heads

    def pairs(self) -> list[tuple[int, int]]:
        """(token, head) of every row, in order."""
        return [(token, head) for token in range(self.tokens) for head in range(self.heads)]


def token_parts(target: Target, shape: AttentionShape) -> list[Rows]:
    """The tiles that one token's heads go through, in order: parts of equal and smaller size."""
    most = _most_rows(target, shape)
    return [Rows(1, min(most, shape.group - start)) for start in range(0, shape.group, most)]


def rows_of(target: Target, shape: AttentionShape) -> list[Rows]:
    """The different tiles that a kernel is made of: those of one token, and as many neighbouring
    tokens as fit the registers."""
    single = dict.fromkeys(token_parts(target, shape))
    together = _most_rows(target, shape) // shape.group
    return [*single] if together < 2 else [*single, Rows(together, shape.group)]


def _most_rows(target: Target, shape: AttentionShape) -> int:
    """Query rows whose score vectors fit the registers beside the key vectors, their scales where
    they have any, and one broadcast."""
    vectors = KV_BLOCK // target.lanes
    beside = 2 * vectors if shape.is_int8 else vectors
    return max(1, (target.registers - beside - 1) // vectors)


def state_bytes(target: Target, shape: AttentionShape, rows: int) -> int:
    """Bytes of a partial result: outputs, maximum and sum vectors of each row."""
    return rows * (shape.value_stride + 2 * target.lanes) * 4


def layer_base(t: Text, shape: AttentionShape, slot: str) -> tuple[str, str]:
    """(address of this layer's keys in the slot's memory, positions the memory holds)."""
    bases = step_word(t, StepWord.SLOT_BASE, "!llvm.ptr")
    capacities = step_word(t, StepWord.SLOT_CAPACITY, "!llvm.ptr")
    base = t.load(t.gep(bases, slot, "!llvm.ptr"), "!llvm.ptr", 8)
    capacity = t.load(t.gep(capacities, slot, "i64"), "i64", 8)
    return t.gep(base, t.mul(capacity, "%kv_offset"), shape.element), capacity


_SPAN_ARGS = [
    ("q", "!llvm.ptr"),
    ("ldq", "i64"),
    ("keys", "!llvm.ptr"),
    ("values", "!llvm.ptr"),
    ("low", "i64"),
    ("last", "i64"),
    ("window", "i64"),
    ("scale", "f32"),
    ("softcap", "f32"),
    ("slopes", "!llvm.ptr"),
    ("state", "!llvm.ptr"),
    ("weights", "!llvm.ptr"),
]


def span_args(values: list[str]) -> list[tuple[str, str]]:
    """Arguments of a span function with their types."""
    return [(v, kind) for v, (_, kind) in zip(values, _SPAN_ARGS, strict=True)]


def emit_span(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
    """`span_NxH(q, ldq, keys, values, low, last, window, …, state, weights)`: the partial result of
    N tokens at positions last, last + 1, … × H heads over cache positions low … low + KV_SPAN - 1.

    Every token must see some position of the first block that the first token sees in the span.
    """
    with t.function(f"span_{rows.name}", _SPAN_ARGS, private=True):
        _Span(t, target, shape, rows).write()
        t.line("return")


class _Span:
    """Writes the body of one span function."""

    def __init__(self, t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
        self.t, self.target, self.shape, self.rows = t, target, shape, rows
        self.lanes = target.lanes
        self.vector = f"vector<{self.lanes}xf32>"
        self.vectors = KV_BLOCK // self.lanes
        self.pack = vm.Lanes(self.lanes)
        self.columns = shape.value_stride // self.lanes

    def write(self) -> None:
        """The walk over the span's blocks, with running maxima and sums in registers."""
        t, rows, vector = self.t, self.rows, self.vector
        count = rows.count
        self.zero, self.one, self.block = t.constant(0), t.constant(1), t.constant(KV_BLOCK)
        self.empty = t.constant(0.0, vector)
        self.lowest = t.op(f"arith.constant dense<0xFF800000> : {vector}")
        self.scale = t.broadcast("%scale", vector)
        self.sums = [t.gep("%state", r * self.shape.value_stride) for r in range(count)]
        self.weights = [t.gep("%weights", r * KV_BLOCK) for r in range(count)]
        self.firsts, self.lasts = self._limits()
        heads = range(rows.heads if self.shape.slopes else 0)
        self.slopes = [t.broadcast(t.load(t.gep("%slopes", h), "f32"), vector) for h in heads]
        for sums in self.sums:
            for c in range(self.columns):
                t.store(self.empty, t.gep(sums, c * self.lanes), vector)

        start = t.mul(t.binary("arith.divui", self.firsts[0], self.block), self.block)
        start = t.binary("arith.maxui", start, "%low")
        end = t.add(self.lasts[-1], self.one)
        end = t.binary("arith.minui", end, t.add("%low", t.constant(KV_SPAN)))
        # Maxima start at the lowest finite number: where all scores of a block, or of a span, are
        # -inf, exp(-inf - maximum) is then 0, not NaN.
        least = t.op(f"arith.constant dense<0xFF7FFFFF> : {vector}")
        carried = [(least, vector)] * count + [(self.empty, vector)] * count
        with t.loop(start, end, self.block, carried) as walk:
            scores = self._scores(walk.index)
            masks = self._masks(walk.index)
            self.distances = self._distances(walk.index) if self.shape.slopes else []
            maxima, totals, factors = self._weigh(scores, masks, walk.carried)
            walk.next = maxima + totals
            self._add_values(walk.index, factors)
        after = t.gep("%state", count * self.shape.value_stride)
        for r, result in enumerate(walk.results):  # maxima, then sums
            t.store(result, t.gep(after, r * self.lanes), vector)

    def _limits(self) -> tuple[list[str], list[str]]:
        """First and last position that each token sees."""
        t = self.t
        firsts, lasts = [], []
        unlimited = t.compare("eq", "%window", self.zero)
        for token in range(self.rows.tokens):
            last = t.add("%last", t.constant(token))
            edge = t.add(t.binary("arith.subi", last, "%window"), self.one)
            edge = t.binary("arith.maxsi", edge, self.zero)
            firsts.append(t.select(unlimited, self.zero, edge, "i64"))
            lasts.append(last)
        return firsts, lasts

    def _widened(self, pointer: str, scale: str | None) -> str:
        """One vector of cached elements as f32; `scale` is that of int8 elements."""
        t, element = self.t, self.shape.element
        if element == "f32":
            return t.load(pointer, self.vector)
        cached = f"vector<{self.lanes}x{element}>"
        value = t.load(pointer, cached, self.shape.layer.element_bytes)
        if scale is None:
            return t.op(f"arith.extf {value} : {cached} to {self.vector}")
        words = f"vector<{self.lanes}xi32>"
        whole = t.op(f"arith.extsi {value} : {cached} to {words}")
        number = t.op(f"arith.sitofp {whole} : {words} to {self.vector}")
        return t.binary("arith.mulf", number, scale, self.vector)

    def _scores(self, start: str) -> dict[tuple[int, int], str]:
        """Dot products of every row with the block's keys: one chain over the key dimension."""
        t, shape, element = self.t, self.shape, self.shape.element
        keys = t.gep("%keys", t.mul(start, t.constant(shape.layer.key_elements)), element)
        queries = ["%q"]
        for _ in range(1, self.rows.tokens):
            queries.append(t.gep(queries[-1], "%ldq"))
        places = [(r, j) for r in range(self.rows.count) for j in range(self.vectors)]
        chains = [self.empty] * len(places)
        part = KV_SCALE_BLOCK if shape.is_int8 else shape.key
        for low in range(0, shape.key, part):
            scales = self._key_scales(keys, low // part)
            high = min(low + part, shape.key)
            begun = [(chain, self.vector) for chain in chains]
            with t.loop(t.constant(low), t.constant(high), self.one, begun) as depth:
                row = t.gep(keys, t.mul(depth.index, self.block), element)
                loaded = [
                    self._widened(t.gep(row, j * self.lanes, element), scales[j])
                    for j in range(self.vectors)
                ]
                at_depth = [t.gep(query, depth.index) for query in queries]
                query = ""
                for chain, (r, j) in zip(depth.carried, places, strict=True):
                    if j == 0:
                        token, head = divmod(r, self.rows.heads)
                        scalar = t.load(t.gep(at_depth[token], head * shape.key), "f32")
                        query = t.broadcast(scalar, self.vector)
                    depth.next.append(t.fma(query, loaded[j], chain, self.vector))
            chains = depth.results
        return dict(zip(places, chains, strict=True))

    def _key_scales(self, keys: str, number: int) -> list[str | None]:
        """The scales of 32 elements of a block of keys, a vector of positions each."""
        if not self.shape.is_int8:
            return [None] * self.vectors
        t = self.t
        first = t.gep(keys, self.shape.key * KV_BLOCK, "i8")
        places = [number * KV_BLOCK + j * self.lanes for j in range(self.vectors)]
        return [t.load(t.gep(first, place), self.vector) for place in places]

    def _masks(self, start: str) -> list[list[str]]:
        """For each token and vector of the block: which positions the token sees."""
        t, lanes = self.t, self.lanes
        whole, mask = f"vector<{lanes}xi32>", f"vector<{lanes}xi1>"
        here = self._places()
        masks = []
        for first, last in zip(self.firsts, self.lasts, strict=True):
            lower, upper = self._in_block(first, start), self._in_block(last, start)
            masks.append(
                [
                    t.binary(
                        "arith.andi",
                        t.compare("sge", positions, lower, whole),
                        t.compare("sle", positions, upper, whole),
                        mask,
                    )
                    for positions in here
                ]
            )
        return masks

    def _places(self) -> list[str]:
        """The numbers of a block's positions within it."""
        places = []
        for j in range(self.vectors):
            numbers = ", ".join(map(str, range(j * self.lanes, (j + 1) * self.lanes)))
            kind = f"vector<{self.lanes}xi32>"
            places.append(self.t.op(f"arith.constant dense<[{numbers}]> : {kind}"))
        return places

    def _in_block(self, position: str, start: str) -> str:
        """A position's number within the block, which may lie outside it, in all lanes."""
        t = self.t
        relative = t.binary("arith.subi", position, start)
        number = t.op(f"arith.trunci {relative} : i64 to i32")
        return t.broadcast(number, f"vector<{self.lanes}xi32>", "i32")

    def _distances(self, start: str) -> list[list[str]]:
        """For each token and vector of the block: key's position − token's, in f32."""
        t, whole = self.t, f"vector<{self.lanes}xi32>"
        here = self._places()
        distances = []
        for token in self.lasts:
            last = self._in_block(token, start)
            away = [t.binary("arith.subi", place, last, whole) for place in here]
            distances.append([t.op(f"arith.sitofp {a} : {whole} to {self.vector}") for a in away])
        return distances

    def _weigh(
        self,
        scores: dict[tuple[int, int], str],
        masks: list[list[str]],
        carried: list[str],
    ) -> tuple[list[str], list[str], list[str]]:
        """The running softmax: weights of the block go to memory; returns new maxima, new sums
        (lane by lane) and the factors that earlier outputs shrink by."""
        t, vector, lanes, count = self.t, self.vector, self.lanes, self.rows.count
        maxima, totals, factors = [], [], []
        for r, (token, head) in enumerate(self.rows.pairs()):
            row = []
            for j in range(self.vectors):
                score = t.binary("arith.mulf", scores[r, j], self.scale, vector)
                if self.shape.softcap:
                    score = _soft_cap(t, score, vector, self.pack)
                if self.shape.slopes:
                    score = t.fma(self.slopes[head], self.distances[token][j], score, vector)
                row.append(_masked(t, masks[token][j], score, self.lowest, lanes))
            most = row[0]
            for other in row[1:]:
                most = vm.maximum(t, other, most, vector)
            most = vm.reduce_vector(t, most, lanes, "max")
            most = vm.maximum(t, most, carried[r], vector)
            factor = vm.exp_of_difference(
                t, t.binary("arith.subf", carried[r], most, vector), self.pack
            )
            total = t.binary("arith.mulf", carried[count + r], factor, vector)
            for j, score in enumerate(row):
                weight = vm.exp_of_difference(
                    t, t.binary("arith.subf", score, most, vector), self.pack
                )
                weight = _masked(t, masks[token][j], weight, self.empty, lanes)
                t.store(weight, t.gep(self.weights[r], j * lanes), vector)
                total = t.binary("arith.addf", total, weight, vector)
            maxima.append(most)
            totals.append(total)
            factors.append(factor)
        return maxima, totals, factors

    def _add_values(self, start: str, factors: list[str]) -> None:
        """outputs = outputs · factor + weights · values: one chain over the block's positions.

        Tokens share each value read up to the last position that all of them see; from there each
        goes on alone and stops at its own position, so that what it must not see cannot reach it,
        not even as a NaN. In a block where a window begins each token goes alone throughout.
        """
        t, tokens = self.t, range(self.rows.tokens)
        everyone = list(range(self.rows.count))

        def inside(position: str) -> str:
            relative = t.binary("arith.subi", position, start)
            return t.binary("arith.minsi", t.binary("arith.maxsi", relative, self.zero), self.block)

        lows = [inside(first) for first in self.firsts]
        highs = [inside(t.add(last, self.one)) for last in self.lasts]

        def rows_of_token(token: int) -> list[int]:
            return [r for r, (owner, _) in enumerate(self.rows.pairs()) if owner == token]

        def together() -> list[str]:
            self._chains(start, everyone, factors, self.zero, highs[0])
            for token in tokens[1:]:
                self._chains(start, rows_of_token(token), None, highs[0], highs[token])
            return []

        def apart() -> list[str]:
            for token in tokens:
                self._chains(start, rows_of_token(token), factors, lows[token], highs[token])
            return []

        if self.rows.tokens == 1:
            apart()
        else:
            t.choose(t.compare("ule", self.firsts[-1], start), together, apart, [])

    def _chains(
        self, start: str, rows: list[int], factors: list[str] | None, low: str, high: str
    ) -> None:
        """Positions start + low … start + high - 1 for some rows, a few columns at a time; without
        `factors` the chains go on within a block."""
        t, shape, vector, lanes = self.t, self.shape, self.vector, self.lanes
        stride = shape.layer.value_elements
        values = t.gep("%values", t.mul(start, t.constant(stride)), shape.element)
        beside = 3 if shape.is_int8 else 2  # a weight, and a scale
        width = max(1, min(self.columns, (self.target.registers - beside) // (len(rows) + 1)))
        for c in range(0, self.columns, width):
            chunk = range(c, min(self.columns, c + width))
            cells = [(r, column) for r in rows for column in chunk]
            begun = []
            for r, column in cells:
                so_far = t.load(t.gep(self.sums[r], column * lanes), vector)
                if factors is not None:
                    so_far = t.binary("arith.mulf", so_far, factors[r], vector)
                begun.append((so_far, vector))
            with t.loop(low, high, self.one, begun) as position:
                row = t.gep(values, t.mul(position.index, t.constant(stride)), shape.element)
                scales = self._value_scales(row, chunk)
                loaded = [
                    self._widened(t.gep(row, at * lanes, shape.element), scales[at]) for at in chunk
                ]
                weight = ""
                for chain, (r, column) in zip(position.carried, cells, strict=True):
                    if column == c:
                        scalar = t.load(t.gep(self.weights[r], position.index), "f32")
                        weight = t.broadcast(scalar, vector)
                    position.next.append(t.fma(weight, loaded[column - c], chain, vector))
            for result, (r, column) in zip(position.results, cells, strict=True):
                t.store(result, t.gep(self.sums[r], column * lanes), vector)

    def _value_scales(self, row: str, chunk: range) -> dict[int, str | None]:
        """For each vector of a value: its scale in all lanes."""
        if not self.shape.is_int8:
            return dict.fromkeys(chunk)
        t = self.t
        first = t.gep(row, self.shape.value_stride, "i8")
        block_of = {at: at * self.lanes // KV_SCALE_BLOCK for at in chunk}
        scales = {
            block: t.broadcast(t.load(t.gep(first, block), "f32"), self.vector)
            for block in dict.fromkeys(block_of.values())
        }
        return {at: scales[block] for at, block in block_of.items()}


def _soft_cap(t: Text, score: str, vector: str, pack: vm.Lanes) -> str:
    """cap · tanh(score / cap)."""
    cap = t.broadcast("%softcap", vector)
    inner = vm.tanh(t, t.binary("arith.divf", score, cap, vector), pack)
    return t.binary("arith.mulf", inner, cap, vector)


def _masked(t: Text, mask: str, value: str, otherwise: str, lanes: int) -> str:
    return t.op(
        f"arith.select {mask}, {value}, {otherwise} : vector<{lanes}xi1>, vector<{lanes}xf32>"
    )
