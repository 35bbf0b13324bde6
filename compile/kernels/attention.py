"""The attention kernel: causal attention of each token over its slot's KV cache, updated in place.

A slot's memory holds, layer after layer, keys `[kv head][block][key dim][KV block]` (positions side
by side, so that scores of a block are vectors without horizontal sums) and values
`[kv head][position][value stride]`. Work follows the actual length. A query walks its blocks at
fixed cache positions with a running softmax (Milakov and Gimelshein 2018; FlashAttention), so its
arithmetic depends on its own sequence alone.
"""

from dataclasses import dataclass

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.step import barrier, declare_barrier, step_word, thread_share
from buddy_pipeline.compile.manifest import KV_BLOCK, StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


@dataclass(frozen=True)
class AttentionShape:
    """What the code of an attention kernel depends on."""

    key: int  # elements of a query or key head
    value: int  # elements of a value head
    group: int  # query heads that share a KV head
    softcap: bool

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        cap = "_cap" if self.softcap else ""
        return f"bp_attention_f32_k{self.key}_v{self.value}_g{self.group}{cap}"

    @property
    def value_stride(self) -> int:
        """Elements of one cached value row."""
        return -(-self.value // 16) * 16


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
    ("step", "!llvm.ptr"),
    ("tid", "i64"),
]


def attention_scratch_bytes(target: Target, shape: AttentionShape) -> int:
    """Bytes of scratch per thread: weights of a block and running outputs of a tile's rows."""
    return _rows(target, shape) * (KV_BLOCK + shape.value_stride) * 4


def emit_attention(target: Target, shape: AttentionShape) -> str:
    """MLIR text of the module with the kernel for `shape`."""
    t = Text()
    declare_barrier(t)
    rows = _rows(target, shape)
    for size in sorted({rows, shape.group % rows} - {0}):
        _emit_rows(t, target, shape, size)
    _emit_store(t, target, shape)
    _emit_entry(t, target, shape, rows)
    return str(t)


def _rows(target: Target, shape: AttentionShape) -> int:
    """Query heads of one register tile: their score vectors, the key vectors and one broadcast
    query element fit the registers."""
    vectors = KV_BLOCK // target.lanes
    return max(1, min(shape.group, (target.registers - vectors - 1) // vectors))


def _layer_base(t: Text, slot: str) -> tuple[str, str]:
    """(address of this layer's keys in the slot's memory, positions the memory holds)."""
    bases = step_word(t, StepWord.SLOT_BASE, "!llvm.ptr")
    capacities = step_word(t, StepWord.SLOT_CAPACITY, "!llvm.ptr")
    base = t.load(t.gep(bases, slot, "!llvm.ptr"), "!llvm.ptr", 8)
    capacity = t.load(t.gep(capacities, slot, "i64"), "i64", 8)
    return t.gep(base, t.mul(capacity, "%kv_offset")), capacity


def _emit_store(t: Text, target: Target, shape: AttentionShape) -> None:
    """`store_kv(…)`: writes keys and values of this thread's tokens into the cache."""
    kinds = dict(SIGNATURE)
    names = ["k", "ldk", "v", "ldv", "kv_heads", "kv_offset", "step", "tid"]
    lanes, vector = target.lanes, f"vector<{target.lanes}xf32>"
    with t.function("store_kv", [(n, kinds[n]) for n in names], private=True):
        zero, one, block = t.constant(0), t.constant(1), t.constant(KV_BLOCK)
        tokens, team = step_word(t, StepWord.TOKENS), step_word(t, StepWord.TEAM)
        positions = step_word(t, StepWord.POSITIONS, "!llvm.ptr")
        slots = step_word(t, StepWord.SLOTS, "!llvm.ptr")
        low, high = thread_share(t, tokens, "%tid", team)
        with t.loop(low, high, one) as token:
            position = t.load(t.gep(positions, token.index, "i64"), "i64", 8)
            slot = t.load(t.gep(slots, token.index, "i64"), "i64", 8)
            keys, capacity = _layer_base(t, slot)
            key_head = t.mul(capacity, t.constant(shape.key))
            values = t.gep(keys, t.mul(key_head, "%kv_heads"))
            value_head = t.mul(capacity, t.constant(shape.value_stride))
            number = t.binary("arith.divui", position, block)
            lane = t.binary("arith.remui", position, block)
            with t.loop(zero, "%kv_heads", one) as head:
                source = t.gep("%k", t.mul(token.index, "%ldk"))
                source = t.gep(source, t.mul(head.index, t.constant(shape.key)))
                to = t.gep(keys, t.mul(head.index, key_head))
                to = t.gep(to, t.mul(number, t.constant(shape.key * KV_BLOCK)))
                to = t.gep(to, lane)
                with t.loop(zero, t.constant(shape.key), one) as d:
                    element = t.load(t.gep(source, d.index), "f32")
                    t.store(element, t.gep(to, t.mul(d.index, block)), "f32")
                source = t.gep("%v", t.mul(token.index, "%ldv"))
                source = t.gep(source, t.mul(head.index, t.constant(shape.value)))
                to = t.gep(values, t.mul(head.index, value_head))
                to = t.gep(to, t.mul(position, t.constant(shape.value_stride)))
                whole = shape.value // lanes * lanes
                for e in range(0, whole, lanes):
                    t.store(t.load(t.gep(source, e), vector), t.gep(to, e), vector)
                for e in range(whole, shape.value):
                    t.store(t.load(t.gep(source, e), "f32"), t.gep(to, e), "f32")
                for e in range(shape.value, shape.value_stride):
                    t.store(t.constant(0.0, "f32"), t.gep(to, e), "f32")
        t.line("return")


_ROWS_ARGS = [
    ("q", "!llvm.ptr"),
    ("keys", "!llvm.ptr"),
    ("values", "!llvm.ptr"),
    ("out", "!llvm.ptr"),
    ("first", "i64"),
    ("last", "i64"),
    ("scale", "f32"),
    ("softcap", "f32"),
    ("scratch", "!llvm.ptr"),
]


def _emit_rows(t: Text, target: Target, shape: AttentionShape, rows: int) -> None:
    """`rows_R(q, keys, values, out, first, last, …)`: R query heads of one token that share a KV
    head attend to positions first … last."""
    lanes = target.lanes
    vector = f"vector<{lanes}xf32>"
    vectors = KV_BLOCK // lanes
    pack = vm.Lanes(lanes)
    columns = shape.value_stride // lanes
    with t.function(f"rows_{rows}", _ROWS_ARGS, private=True):
        zero, one, block = t.constant(0), t.constant(1), t.constant(KV_BLOCK)
        weights = [t.gep("%scratch", r * KV_BLOCK) for r in range(rows)]
        running = t.gep("%scratch", rows * KV_BLOCK)
        sums = [t.gep(running, r * shape.value_stride) for r in range(rows)]
        empty = t.constant(0.0, vector)
        for r in range(rows):
            for c in range(columns):
                t.store(empty, t.gep(sums[r], c * lanes), vector)
        scale = t.broadcast("%scale", vector)
        lane_numbers = t.op(
            f"arith.constant dense<[{', '.join(map(str, range(lanes)))}]> : vector<{lanes}xi64>"
        )
        first_lanes = t.broadcast("%first", f"vector<{lanes}xi64>", "i64")
        last_lanes = t.broadcast("%last", f"vector<{lanes}xi64>", "i64")
        lowest = t.op(f"arith.constant dense<0xFF800000> : {vector}")

        block_low = t.mul(t.binary("arith.divui", "%first", block), block)
        end = t.add("%last", one)
        # Maxima start at the lowest finite number: of a block whose scores are all -inf, exp(-inf
        # - maximum) is then 0, not NaN.
        least = t.op(f"arith.constant dense<0xFF7FFFFF> : {vector}")
        carried = [(least, vector)] * rows + [(empty, vector)] * rows
        with t.loop(block_low, end, block, carried) as walk:
            maxima, totals = walk.carried[:rows], walk.carried[rows:]
            start = walk.index
            keys = t.gep("%keys", t.mul(start, t.constant(shape.key)))
            places = [(r, j) for r in range(rows) for j in range(vectors)]
            with t.loop(zero, t.constant(shape.key), one, [(empty, vector)] * len(places)) as depth:
                row = t.gep(keys, t.mul(depth.index, block))
                loaded = [t.load(t.gep(row, j * lanes), vector, 4) for j in range(vectors)]
                query = t.gep("%q", depth.index)
                element = ""
                for chain, (r, j) in zip(depth.carried, places, strict=True):
                    if j == 0:
                        scalar = t.load(t.gep(query, r * shape.key), "f32")
                        element = t.broadcast(scalar, vector)
                    depth.next.append(t.fma(element, loaded[j], chain, vector))
            scores = dict(zip(places, depth.results, strict=True))

            masks = []
            for j in range(vectors):
                here = t.broadcast(
                    t.add(start, t.constant(j * lanes)), f"vector<{lanes}xi64>", "i64"
                )
                here = t.binary("arith.addi", here, lane_numbers, f"vector<{lanes}xi64>")
                after = t.compare("sge", here, first_lanes, f"vector<{lanes}xi64>")
                before = t.compare("sle", here, last_lanes, f"vector<{lanes}xi64>")
                masks.append(t.binary("arith.andi", after, before, f"vector<{lanes}xi1>"))

            next_maxima, next_totals, factors = [], [], []
            for r in range(rows):
                row_scores = []
                for j in range(vectors):
                    score = t.binary("arith.mulf", scores[r, j], scale, vector)
                    if shape.softcap:
                        score = _soft_cap(t, score, vector, pack)
                    row_scores.append(_masked(t, masks[j], score, lowest, lanes))
                most = row_scores[0]
                for other in row_scores[1:]:
                    most = vm.maximum(t, other, most, vector)
                most = vm.reduce_vector(t, most, lanes, "max")
                most = vm.maximum(t, most, maxima[r], vector)
                factor = vm.exp(t, t.binary("arith.subf", maxima[r], most, vector), pack)
                total = t.binary("arith.mulf", totals[r], factor, vector)
                for j, score in enumerate(row_scores):
                    weight = vm.exp(t, t.binary("arith.subf", score, most, vector), pack)
                    weight = _masked(t, masks[j], weight, empty, lanes)
                    t.store(weight, t.gep(weights[r], j * lanes), vector)
                    total = t.binary("arith.addf", total, weight, vector)
                next_maxima.append(most)
                next_totals.append(total)
                factors.append(factor)
            walk.next = next_maxima + next_totals

            left = t.binary("arith.subi", end, start)
            count = t.binary("arith.minui", left, block)
            skipped = t.binary("arith.subi", "%first", start)
            skipped = t.binary("arith.maxsi", skipped, zero)
            values = t.gep("%values", t.mul(start, t.constant(shape.value_stride)))
            width = max(1, min(columns, (target.registers - 2) // (rows + 1)))
            for c in range(0, columns, width):
                chunk = range(c, min(columns, c + width))
                cells = [(r, column) for r in range(rows) for column in chunk]
                begun = []
                for r, column in cells:
                    so_far = t.load(t.gep(sums[r], column * lanes), vector)
                    begun.append((t.binary("arith.mulf", so_far, factors[r], vector), vector))
                with t.loop(skipped, count, one, begun) as j_loop:
                    row = t.gep(values, t.mul(j_loop.index, t.constant(shape.value_stride)))
                    loaded = [t.load(t.gep(row, column * lanes), vector) for column in chunk]
                    element = ""
                    for chain, (r, column) in zip(j_loop.carried, cells, strict=True):
                        if column == c:
                            scalar = t.load(t.gep(weights[r], j_loop.index), "f32")
                            element = t.broadcast(scalar, vector)
                        j_loop.next.append(t.fma(element, loaded[column - c], chain, vector))
                for result, (r, column) in zip(j_loop.results, cells, strict=True):
                    t.store(result, t.gep(sums[r], column * lanes), vector)

        for r in range(rows):
            total = vm.reduce_vector(t, walk.results[rows + r], lanes, "sum")
            for c in range(columns):
                value = t.load(t.gep(sums[r], c * lanes), vector)
                value = t.binary("arith.divf", value, total, vector)
                _store_part(t, value, t.gep("%out", r * shape.value), c * lanes, shape, lanes)
        t.line("return")


def _soft_cap(t: Text, score: str, vector: str, pack: vm.Lanes) -> str:
    """cap · tanh(score / cap)."""
    cap = t.broadcast("%softcap", vector)
    inner = vm.tanh(t, t.binary("arith.divf", score, cap, vector), pack)
    return t.binary("arith.mulf", inner, cap, vector)


def _masked(t: Text, mask: str, value: str, otherwise: str, lanes: int) -> str:
    return t.op(
        f"arith.select {mask}, {value}, {otherwise} : vector<{lanes}xi1>, vector<{lanes}xf32>"
    )


def _store_part(
    t: Text, value: str, row: str, column: int, shape: AttentionShape, lanes: int
) -> None:
    """Stores the lanes of `value` that lie inside the value head."""
    inside = min(lanes, shape.value - column)
    if inside == lanes:
        t.store(value, t.gep(row, column), f"vector<{lanes}xf32>")
        return
    for lane in range(inside):
        element = t.op(f"vector.extract {value}[{lane}] : f32 from vector<{lanes}xf32>")
        t.store(element, t.gep(row, column + lane), "f32")


def _emit_entry(t: Text, target: Target, shape: AttentionShape, rows: int) -> None:
    """The kernel: stores this step's keys and values, then deals (token, KV head) units round."""
    kinds = dict(SIGNATURE)
    with t.function(shape.name, SIGNATURE):
        stored = ["k", "ldk", "v", "ldv", "kv_heads", "kv_offset", "step", "tid"]
        t.call("store_kv", [(f"%{n}", kinds[n]) for n in stored])
        barrier(t)
        zero, one = t.constant(0), t.constant(1)
        tokens, team = step_word(t, StepWord.TOKENS), step_word(t, StepWord.TEAM)
        positions = step_word(t, StepWord.POSITIONS, "!llvm.ptr")
        slots = step_word(t, StepWord.SLOTS, "!llvm.ptr")
        scratch = step_word(t, StepWord.SCRATCH, "!llvm.ptr")
        stride = step_word(t, StepWord.SCRATCH_STRIDE)
        scratch = t.gep(scratch, t.mul("%tid", stride), "i8")
        units = t.mul(tokens, "%kv_heads")
        # Later tokens have more to read: dealing units round keeps the team level.
        with t.loop("%tid", units, team) as unit:
            token = t.binary("arith.divui", unit.index, "%kv_heads")
            head = t.binary("arith.remui", unit.index, "%kv_heads")
            last = t.load(t.gep(positions, token, "i64"), "i64", 8)
            slot = t.load(t.gep(slots, token, "i64"), "i64", 8)
            layer, capacity = _layer_base(t, slot)
            key_head = t.mul(capacity, t.constant(shape.key))
            keys = t.gep(layer, t.mul(head, key_head))
            values = t.gep(layer, t.mul(key_head, "%kv_heads"))
            value_head = t.mul(capacity, t.constant(shape.value_stride))
            values = t.gep(values, t.mul(head, value_head))
            # A window of w sees the token itself and w - 1 before it; 0 means no window.
            edge = t.add(t.binary("arith.subi", last, "%window"), one)
            edge = t.binary("arith.maxsi", edge, zero)
            unlimited = t.compare("eq", "%window", zero)
            first = t.select(unlimited, zero, edge, "i64")
            q = t.gep("%q", t.mul(token, "%ldq"))
            q = t.gep(q, t.mul(head, t.constant(shape.group * shape.key)))
            out = t.gep("%out", t.mul(token, "%ldo"))
            out = t.gep(out, t.mul(head, t.constant(shape.group * shape.value)))
            for start in range(0, shape.group, rows):
                size = min(rows, shape.group - start)
                values_of = [
                    t.gep(q, start * shape.key),
                    keys,
                    values,
                    t.gep(out, start * shape.value),
                    first,
                    last,
                    "%scale",
                    "%softcap",
                    scratch,
                ]
                call = [(v, kind) for v, (_, kind) in zip(values_of, _ROWS_ARGS, strict=True)]
                t.call(f"rows_{size}", call)
        t.line("return")
