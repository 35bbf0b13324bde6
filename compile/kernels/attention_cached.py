"""Reading cached elements as f32, and the scales of int8 ones."""

from buddy_pipeline.compile.kernels.attention_shape import AttentionShape
from buddy_pipeline.compile.manifest import KV_BLOCK, KV_SCALE_BLOCK
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


def widened(t: Text, target: Target, shape: AttentionShape, pointer: str, scale: str | None) -> str:
    """One vector of cached elements as f32; `scale` is that of int8 elements."""
    element, vector = shape.element, f"vector<{target.lanes}xf32>"
    if element == "f32":
        return t.load(pointer, vector)
    cached = f"vector<{target.lanes}x{element}>"
    value = t.load(pointer, cached, shape.layer.element_bytes)
    if scale is None:
        return t.op(f"arith.extf {value} : {cached} to {vector}")
    words = f"vector<{target.lanes}xi32>"
    whole = t.op(f"arith.extsi {value} : {cached} to {words}")
    number = t.op(f"arith.sitofp {whole} : {words} to {vector}")
    return t.binary("arith.mulf", number, scale, vector)


def key_scales(
    t: Text,
    target: Target,
    shape: AttentionShape,
    block: str,
    inside: str | int,
    number: int,
    vectors: int,
) -> list[str | None]:
    """The scales of the `number`th 32 elements of a block of keys, a vector of positions each, from
    place `inside` of the block on."""
    if not shape.is_int8:
        return [None] * vectors
    first = t.gep(t.gep(block, shape.key * KV_BLOCK, "i8"), inside)
    places = [number * KV_BLOCK + j * target.lanes for j in range(vectors)]
    return [t.load(t.gep(first, place), f"vector<{target.lanes}xf32>") for place in places]


def value_scales(
    t: Text, target: Target, shape: AttentionShape, row: str, column: str, vectors: int
) -> list[str | None]:
    """For each vector of a value from element `column` on: its scale in all lanes."""
    if not shape.is_int8:
        return [None] * vectors
    first = t.gep(row, shape.value_stride, "i8")
    scales: list[str | None] = []
    for j in range(vectors):
        element = t.add(column, t.constant(j * target.lanes))
        number = t.binary("arith.divui", element, t.constant(KV_SCALE_BLOCK))
        scale = t.load(t.gep(first, number), "f32")
        scales.append(t.broadcast(scale, f"vector<{target.lanes}xf32>"))
    return scales
