"""Storing a step's keys and values in the cache.

In int8 a cached number is q · max|x| / 127 over a block of 32 elements, which are of one head at
one position, so it depends on that token's sequence alone. A block with a NaN or an infinity
becomes all NaN.
"""

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.attention_parts import AttentionShape, layer_base
from buddy_pipeline.compile.kernels.step import step_word, thread_share
from buddy_pipeline.compile.manifest import KV_BLOCK, KV_SCALE_BLOCK, StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


def emit_store(t: Text, target: Target, shape: AttentionShape) -> None:
    """`store_kv(…)`: writes keys and values of this thread's tokens into the cache."""
    args = [("k", "!llvm.ptr"), ("ldk", "i64"), ("v", "!llvm.ptr"), ("ldv", "i64")]
    args += [("kv_heads", "i64"), ("kv_offset", "i64"), ("step", "!llvm.ptr"), ("tid", "i64")]
    element, layer = shape.element, shape.layer
    with t.function("store_kv", args, private=True):
        zero, one, block = t.constant(0), t.constant(1), t.constant(KV_BLOCK)
        tokens, team = step_word(t, StepWord.TOKENS), step_word(t, StepWord.TEAM)
        positions = step_word(t, StepWord.POSITIONS, "!llvm.ptr")
        slots = step_word(t, StepWord.SLOTS, "!llvm.ptr")
        low, high = thread_share(t, tokens, "%tid", team)
        with t.loop(low, high, one) as token:
            position = t.load(t.gep(positions, token.index, "i64"), "i64", 8)
            slot = t.load(t.gep(slots, token.index, "i64"), "i64", 8)
            keys, capacity = layer_base(t, shape, slot)
            key_head = t.mul(capacity, t.constant(layer.key_elements))
            values = t.gep(keys, t.mul(key_head, "%kv_heads"), element)
            value_head = t.mul(capacity, t.constant(layer.value_elements))
            number = t.binary("arith.divui", position, block)
            lane = t.binary("arith.remui", position, block)
            with t.loop(zero, "%kv_heads", one) as head:
                source = t.gep("%k", t.mul(token.index, "%ldk"))
                source = t.gep(source, t.mul(head.index, t.constant(shape.key)))
                to = t.gep(keys, t.mul(head.index, key_head), element)
                to = t.gep(to, t.mul(number, t.constant(layer.key_elements * KV_BLOCK)), element)
                _store_key(t, target, shape, source, to, lane)
                source = t.gep("%v", t.mul(token.index, "%ldv"))
                source = t.gep(source, t.mul(head.index, t.constant(shape.value)))
                to = t.gep(values, t.mul(head.index, value_head), element)
                to = t.gep(to, t.mul(position, t.constant(layer.value_elements)), element)
                _store_value(t, target, shape, source, to)
        t.line("return")


def _store_key(
    t: Text, target: Target, shape: AttentionShape, source: str, block: str, lane: str
) -> None:
    """One head's key at place `lane` of a block of positions."""
    element = shape.element
    to = t.gep(block, lane, element)
    if shape.is_int8:
        scales = t.gep(t.gep(block, shape.key * KV_BLOCK, "i8"), lane)
        _store_int8(t, target, source, shape.key, (to, KV_BLOCK), (scales, KV_BLOCK))
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
        _store_int8(t, target, source, shape.value, (to, 1), (scales, 1))
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


def _store_int8(
    t: Text,
    target: Target,
    source: str,
    count: int,
    to: tuple[str, int],
    scales: tuple[str, int],
) -> None:
    """Quantises `count` f32 at `source`.

    `to` is where the bytes go and how far apart, `scales` the same for the scales (f32).
    """
    place, step = to
    for first in range(0, count, KV_SCALE_BLOCK):
        size = min(KV_SCALE_BLOCK, count - first)
        block = t.gep(source, first)
        scale, inverse = _scale(t, target, block, size)
        t.store(scale, t.gep(scales[0], first // KV_SCALE_BLOCK * scales[1]), "f32")
        begin = t.gep(place, first * step, "i8")
        lanes = target.lanes if step == 1 else 0
        whole = size // lanes * lanes if lanes else 0
        for at in range(0, whole, lanes or 1):
            _store(t, t.gep(block, at), t.gep(begin, at, "i8"), inverse, lanes)
        with t.loop(t.constant(whole), t.constant(size), t.constant(1)) as rest:
            at_rest = t.gep(begin, t.mul(rest.index, t.constant(step)), "i8")
            _store(t, t.gep(block, rest.index), at_rest, inverse, 0)


def _store(t: Text, source: str, to: str, inverse: str, lanes: int) -> None:
    """Rounds x · inverse to the nearest integer, ties to even; one element or a vector of them."""
    f, i, byte = (f"vector<{lanes}x{e}>" if lanes else e for e in ("f32", "i32", "i8"))
    factor = t.broadcast(inverse, f) if lanes else inverse
    shifted = t.fma(t.load(source, f), factor, t.constant(vm.INTEGER_MAGIC, f), f)
    bits = t.op(f"arith.bitcast {shifted} : {f} to {i}")
    t.store(t.op(f"arith.trunci {bits} : {i} to {byte}"), to, byte, 1)


def _scale(t: Text, target: Target, block: str, size: int) -> tuple[str, str]:
    """max|x| / 127 over a block and its inverse, which is 0 for a block of zeros.

    Absolute values are compared as integers, in whose order a NaN is above all numbers.
    """
    lanes = target.lanes
    whole = size // lanes * lanes
    largest = t.constant(0, "i32")
    if whole:
        kind = f"vector<{lanes}xi32>"
        most = t.constant(0, kind)
        for at in range(0, whole, lanes):
            most = t.binary("arith.maxsi", most, _magnitude(t, t.gep(block, at), kind), kind)
        largest = t.op(f"vector.reduction <maxsi>, {most} : {kind} into i32")
    one = t.constant(1)
    start = [(largest, "i32")]
    with t.loop(t.constant(whole), t.constant(size), one, start) as rest:
        element = _magnitude(t, t.gep(block, rest.index), "i32")
        rest.next = [t.binary("arith.maxsi", rest.carried[0], element, "i32")]
    return vm.integer_scale(t, rest.results[0], full=127)


def _magnitude(t: Text, source: str, kind: str) -> str:
    """The bits of |x|."""
    return t.binary("arith.andi", t.load(source, kind), t.constant(0x7FFFFFFF, kind), kind)
