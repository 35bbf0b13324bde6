"""The queries of a tile, copied to where scores read them."""

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.attention_shape import AttentionShape, Rows
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

_QUERIES_ARGS = [
    ("q", "!llvm.ptr"),
    ("ldq", "i64"),
    ("scale", "f32"),
    ("softcap", "f32"),
    ("to", "!llvm.ptr"),
]


def queries_args(values: list[str]) -> list[tuple[str, str]]:
    """Arguments of a `queries` function with their types."""
    return [(v, kind) for v, (_, kind) in zip(values, _QUERIES_ARGS, strict=True)]


def emit_queries(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
    """`queries_NxH(q, ldq, scale, softcap, to)`: rows of q, `query_stride` apart, times what scores
    are multiplied by: scale · log2 e, or scale / cap where a tanh comes first."""
    lanes = target.lanes
    with t.function(f"queries_{rows.name}", _QUERIES_ARGS, private=True):
        if shape.softcap:
            factor = t.binary("arith.divf", "%scale", "%softcap", "f32")
        else:
            factor = t.binary("arith.mulf", "%scale", t.constant(vm.LOG2_E, "f32"), "f32")
        vector = f"vector<{lanes}xf32>"
        factors = t.broadcast(factor, vector)
        whole = shape.key // lanes * lanes
        row = "%q"
        for token in range(rows.tokens):
            row = t.gep(row, "%ldq") if token else row
            for head in range(rows.heads):
                source = t.gep(row, head * shape.key)
                to = t.gep("%to", (token * rows.heads + head) * shape.query_stride)
                for d in range(0, whole, lanes):
                    number = t.load(t.gep(source, d), vector)
                    number = t.binary("arith.mulf", number, factors, vector)
                    t.store(number, t.gep(to, d), vector)
                for d in range(whole, shape.key):
                    number = t.load(t.gep(source, d), "f32")
                    number = t.binary("arith.mulf", number, factor, "f32")
                    t.store(number, t.gep(to, d), "f32")
        t.line("return")
