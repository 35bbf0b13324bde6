"""Widening a span's keys and values to f32, once for all tiles that read it."""

from buddy_pipeline.compile.kernels.attention_cached import key_scales, value_scales, widened
from buddy_pipeline.compile.kernels.attention_shape import AttentionShape
from buddy_pipeline.compile.manifest import KV_BLOCK, KV_SCALE_BLOCK, KV_SPAN
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

_WIDEN_ARGS = [
    ("keys", "!llvm.ptr"),
    ("values", "!llvm.ptr"),
    ("end", "i64"),
    ("wide_keys", "!llvm.ptr"),
    ("wide_values", "!llvm.ptr"),
]


def widen_args(values: list[str]) -> list[tuple[str, str]]:
    """Arguments of `widen` with their types."""
    return [(v, kind) for v, (_, kind) in zip(values, _WIDEN_ARGS, strict=True)]


def widened_key_bytes(shape: AttentionShape) -> int:
    """Bytes of a span's keys as f32."""
    return KV_SPAN * shape.key * 4


def widened_bytes(shape: AttentionShape) -> int:
    """Bytes of a span's keys and values as f32; none where the cache is."""
    if shape == shape.widened:
        return 0
    return widened_key_bytes(shape) + KV_SPAN * shape.value_stride * 4


def emit_widen(t: Text, target: Target, shape: AttentionShape) -> None:
    """`widen(keys, values, end, wide_keys, wide_values)`: the places below `end` of a span, and
    what shares a block of keys with these, as a cache of f32 has them."""
    with t.function("widen", _WIDEN_ARGS, private=True):
        zero, one = t.constant(0), t.constant(1)
        blocks = t.binary("arith.ceildivui", "%end", t.constant(KV_BLOCK))
        with t.loop(zero, blocks, one) as block:
            _keys(t, target, shape, block.index)
        with t.loop(zero, "%end", one) as place:
            _value(t, target, shape, place.index)
        t.line("return")


def _keys(t: Text, target: Target, shape: AttentionShape, number: str) -> None:
    """One block of keys."""
    lanes, vectors = target.lanes, KV_BLOCK // target.lanes
    size = t.constant(shape.layer.key_elements * KV_BLOCK)
    block = t.gep("%keys", t.mul(number, size), shape.element)
    to = t.gep("%wide_keys", t.mul(number, t.constant(shape.key * KV_BLOCK)))
    for low in range(0, shape.key, KV_SCALE_BLOCK):
        scales = key_scales(t, target, shape, block, 0, low // KV_SCALE_BLOCK, vectors)
        high = min(low + KV_SCALE_BLOCK, shape.key)
        with t.loop(t.constant(low), t.constant(high), t.constant(1)) as d:
            line = t.mul(d.index, t.constant(KV_BLOCK))
            for j, scale in enumerate(scales):
                place = t.add(line, t.constant(j * lanes))
                narrow = t.gep(block, place, shape.element)
                numbers = widened(t, target, shape, narrow, scale)
                t.store(numbers, t.gep(to, place), f"vector<{lanes}xf32>")


def _value(t: Text, target: Target, shape: AttentionShape, place: str) -> None:
    """One position's value."""
    lanes, stride = target.lanes, shape.value_stride
    elements = t.constant(shape.layer.value_elements)
    row = t.gep("%values", t.mul(place, elements), shape.element)
    to = t.gep("%wide_values", t.mul(place, t.constant(stride)))
    scales = value_scales(t, target, shape, row, t.constant(0), stride // lanes)
    for column, scale in zip(range(0, stride, lanes), scales, strict=True):
        numbers = widened(t, target, shape, t.gep(row, column, shape.element), scale)
        t.store(numbers, t.gep(to, column), f"vector<{lanes}xf32>")
