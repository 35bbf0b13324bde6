"""Storing a step's keys and values in the cache."""

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.attention_int8 import store_int8
from buddy_pipeline.compile.kernels.attention_shape import AttentionShape
from buddy_pipeline.compile.kernels.step import step_word, thread_share
from buddy_pipeline.compile.manifest import KV_BLOCK, StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


def layer_base(t: Text, shape: AttentionShape, slot: str) -> tuple[str, str]:
    """(address of this layer's keys in the slot's memory, positions the memory holds)."""
    bases = step_word(t, StepWord.SLOT_BASE, "!llvm.ptr")
    capacities = step_word(t, StepWord.SLOT_CAPACITY, "!llvm.ptr")
    base = t.load(t.gep(bases, slot, "!llvm.ptr"), "!llvm.ptr", 8)
    capacity = t.load(t.gep(capacities, slot, "i64"), "i64", 8)
    return t.gep(base, t.mul(capacity, "%kv_offset"), shape.element), capacity


_ARGS = [
    ("k", "!llvm.ptr"),
    ("ldk", "i64"),
    ("v", "!llvm.ptr"),
    ("ldv", "i64"),
    ("kv_heads", "i64"),
    ("kv_offset", "i64"),
    ("step", "!llvm.ptr"),
    ("tid", "i64"),
]


def emit_store(t: Text, target: Target, shape: AttentionShape) -> None:
    """`store_kv(…)`: writes keys and values of this thread's tokens into the cache.

    Keys of as many neighbouring tokens as a vector has lanes are transposed in registers, where
    they fill a vector of their block (one by one they would take a cache line for each number).
    """
    lanes = target.lanes
    with t.function("store_kv", _ARGS, private=True):
        one, width = t.constant(1), t.constant(lanes)
        tokens, team = step_word(t, StepWord.TOKENS), step_word(t, StepWord.TEAM)
        positions = step_word(t, StepWord.POSITIONS, "!llvm.ptr")
        slots = step_word(t, StepWord.SLOTS, "!llvm.ptr")
        # Shares of whole vectors of tokens, so that a share's start splits no run.
        vectors = t.binary("arith.ceildivui", tokens, width)
        share = thread_share(t, vectors, "%tid", team)
        low, high = (t.binary("arith.minui", t.mul(s, width), tokens) for s in share)

        def one_by_one(first: str, end: str) -> None:
            with t.loop(first, end, one) as token:
                _store_token(t, target, shape, token.index, positions, slots, keys=True)

        if shape.is_int8:
            one_by_one(low, high)
            t.line("return")
            return
        with t.loop(low, high, width) as group:
            first = group.index
            end = t.binary("arith.minui", t.add(first, width), high)

            def joint(first: str = first, end: str = end) -> list[str]:
                _store_keys(t, target, shape, first, positions, slots)
                with t.loop(first, end, one) as token:
                    _store_token(t, target, shape, token.index, positions, slots, keys=False)
                return []

            def apart(first: str = first, end: str = end) -> list[str]:
                one_by_one(first, end)
                return []

            t.choose(_fills_a_vector(t, lanes, first, end, positions, slots), joint, apart, [])
        t.line("return")


def _fills_a_vector(t: Text, lanes: int, first: str, end: str, positions: str, slots: str) -> str:
    """Whether tokens first … end - 1 are `lanes` neighbours in one slot whose positions fill one
    vector of a block."""
    width = t.constant(lanes)
    enough = t.compare("eq", t.binary("arith.subi", end, first), width)

    def checks() -> list[str]:
        start = t.load(t.gep(positions, first, "i64"), "i64", 8)
        slot = t.load(t.gep(slots, first, "i64"), "i64", 8)
        aligned = t.compare("eq", t.binary("arith.remui", start, width), t.constant(0))
        zero, one = t.constant(0), t.constant(1)
        with t.loop(zero, width, one, [(aligned, "i1")]) as token:
            at = t.add(first, token.index)
            position = t.load(t.gep(positions, at, "i64"), "i64", 8)
            follows = t.compare("eq", position, t.add(start, token.index))
            same = t.compare("eq", t.load(t.gep(slots, at, "i64"), "i64", 8), slot)
            both = t.binary("arith.andi", follows, same, "i1")
            token.next = [t.binary("arith.andi", token.carried[0], both, "i1")]
        return token.results

    return t.choose(enough, checks, lambda: [t.op("arith.constant false")], ["i1"])[0]


def _store_token(
    t: Text,
    target: Target,
    shape: AttentionShape,
    token: str,
    positions: str,
    slots: str,
    keys: bool,
) -> None:
    """One token's values, and with `keys` its keys, of all heads."""
    element, layer = shape.element, shape.layer
    position = t.load(t.gep(positions, token, "i64"), "i64", 8)
    slot = t.load(t.gep(slots, token, "i64"), "i64", 8)
    base, capacity = layer_base(t, shape, slot)
    key_head = t.mul(capacity, t.constant(layer.key_elements))
    values = t.gep(base, t.mul(key_head, "%kv_heads"), element)
    value_head = t.mul(capacity, t.constant(layer.value_elements))
    with t.loop(t.constant(0), "%kv_heads", t.constant(1)) as head:
        if keys:
            source = t.gep("%k", t.mul(token, "%ldk"))
            source = t.gep(source, t.mul(head.index, t.constant(shape.key)))
            to, lane = _key_place(t, shape, base, t.mul(head.index, key_head), position)
            _store_key(t, target, shape, source, to, lane)
        source = t.gep("%v", t.mul(token, "%ldv"))
        source = t.gep(source, t.mul(head.index, t.constant(shape.value)))
        to = t.gep(values, t.mul(head.index, value_head), element)
        to = t.gep(to, t.mul(position, t.constant(layer.value_elements)), element)
        _store_value(t, target, shape, source, to)


def _key_place(
    t: Text, shape: AttentionShape, base: str, head: str, position: str
) -> tuple[str, str]:
    """(address of the block that holds a position, the position's place in it)."""
    block = t.constant(KV_BLOCK)
    number = t.binary("arith.divui", position, block)
    size = t.constant(shape.layer.key_elements * KV_BLOCK)
    to = t.gep(t.gep(base, head, shape.element), t.mul(number, size), shape.element)
    return to, t.binary("arith.remui", position, block)


def _store_keys(
    t: Text, target: Target, shape: AttentionShape, first: str, positions: str, slots: str
) -> None:
    """Keys of `lanes` neighbouring tokens from `first` on, of all heads."""
    lanes, element, align = target.lanes, shape.element, shape.layer.element_bytes
    vector = f"vector<{lanes}xf32>"
    position = t.load(t.gep(positions, first, "i64"), "i64", 8)
    slot = t.load(t.gep(slots, first, "i64"), "i64", 8)
    base, capacity = layer_base(t, shape, slot)
    key_head = t.mul(capacity, t.constant(shape.layer.key_elements))
    rows = [t.gep("%k", t.mul(first, "%ldk"))]
    for _ in range(1, lanes):
        rows.append(t.gep(rows[-1], "%ldk"))
    whole = shape.key // lanes * lanes
    with t.loop(t.constant(0), "%kv_heads", t.constant(1)) as head:
        column = t.mul(head.index, t.constant(shape.key))
        to, lane = _key_place(t, shape, base, t.mul(head.index, key_head), position)
        to = t.gep(to, lane, element)
        with t.loop(t.constant(0), t.constant(whole), t.constant(lanes)) as d:
            at = t.add(column, d.index)
            square = _transposed(t, [t.load(t.gep(row, at), vector) for row in rows], lanes)
            line = t.gep(to, t.mul(d.index, t.constant(KV_BLOCK)), element)
            for number, numbers in enumerate(square):
                narrow = vm.narrowed(t, numbers, element, vm.Lanes(lanes), target)
                place = t.gep(line, number * KV_BLOCK, element)
                t.store(narrow, place, f"vector<{lanes}x{element}>", align)
        with t.loop(t.constant(whole), t.constant(shape.key), t.constant(1)) as rest:
            line = t.gep(to, t.mul(rest.index, t.constant(KV_BLOCK)), element)
            at = t.add(column, rest.index)
            for number, row in enumerate(rows):
                value = vm.narrowed(t, t.load(t.gep(row, at), "f32"), element, vm.Lanes(0), target)
                t.store(value, t.gep(line, number, element), element, align)


def _transposed(t: Text, rows: list[str], lanes: int) -> list[str]:
    """The columns of a square of vectors: blocks of half the size change places, then quarters."""
    vector = f"vector<{lanes}xf32>"
    size = lanes // 2
    while size:
        upper = [lane if not lane & size else lanes + lane - size for lane in range(lanes)]
        lower = [lane + size if not lane & size else lanes + lane for lane in range(lanes)]
        following = list(rows)
        for r in range(lanes):
            if r & size:
                continue
            for place, order in ((r, upper), (r + size, lower)):
                text = ", ".join(map(str, order))
                both = f"{rows[r]}, {rows[r + size]}"
                following[place] = t.op(f"vector.shuffle {both} [{text}] : {vector}, {vector}")
        rows = following
        size //= 2
    return rows


def _store_key(
    t: Text, target: Target, shape: AttentionShape, source: str, block: str, lane: str
) -> None:
    """One head's key at place `lane` of a block of positions."""
    element = shape.element
    to = t.gep(block, lane, element)
    if shape.is_int8:
        scales = t.gep(t.gep(block, shape.key * KV_BLOCK, "i8"), lane)
        store_int8(t, target, source, shape.key, (to, KV_BLOCK), (scales, KV_BLOCK))
        return
    with t.loop(t.constant(0), t.constant(shape.key), t.constant(1)) as d:
        number = t.load(t.gep(source, d.index), "f32")
        number = vm.narrowed(t, number, element, vm.Lanes(0), target)
        place = t.gep(to, t.mul(d.index, t.constant(KV_BLOCK)), element)
        t.store(number, place, element, shape.layer.element_bytes)


def _store_value(t: Text, target: Target, shape: AttentionShape, source: str, to: str) -> None:
    """One head's value, padded with zeros."""
    lanes, element, align = target.lanes, shape.element, shape.layer.element_bytes
    if shape.is_int8:
        scales = t.gep(to, shape.value_stride, "i8")
        store_int8(t, target, source, shape.value, (to, 1), (scales, 1))
    else:
        whole = shape.value // lanes * lanes
        for e in range(0, whole, lanes):
            value = t.load(t.gep(source, e), f"vector<{lanes}xf32>")
            value = vm.narrowed(t, value, element, vm.Lanes(lanes), target)
            t.store(value, t.gep(to, e, element), f"vector<{lanes}x{element}>", align)
        for e in range(whole, shape.value):
            value = t.load(t.gep(source, e), "f32")
            value = vm.narrowed(t, value, element, vm.Lanes(0), target)
            t.store(value, t.gep(to, e, element), element, align)
    nothing = t.constant(0, element)
    for e in range(shape.value, shape.value_stride):
        t.store(nothing, t.gep(to, e, element), element, align)
