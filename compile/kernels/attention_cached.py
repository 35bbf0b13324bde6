"""Reading cached elements as f32."""

from buddy_pipeline.compile.kernels.attention_shape import AttentionShape
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
