"""The embedding kernel: gathers one row of a packed table for each token.

The table has the layout of a linear's weights, so that a tied head and the embedding share memory.
"""

from buddy_pipeline.compile.kernels.step import thread_share
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

EMBEDDING = "bp_embedding_f32"

SIGNATURE = [
    ("ids", "!llvm.ptr"),
    ("ldi", "i64"),
    ("table", "!llvm.ptr"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("tokens", "i64"),
    ("depth", "i64"),
    ("tid", "i64"),
    ("team", "i64"),
]


def emit_embedding(target: Target) -> str:
    """MLIR text of the kernel: out[t][k] = table[ids[t · ldi]][k] for k below `depth`."""
    t = Text()
    with t.function(EMBEDDING, SIGNATURE):
        zero, one, width = t.constant(0), t.constant(1), t.constant(target.panel)
        low, high = thread_share(t, "%tokens", "%tid", "%team")
        with t.loop(low, high, one) as token:
            row = t.word(t.gep("%ids", t.mul(token.index, "%ldi"), "i64"), 0)
            panel = t.binary("arith.divui", row, width)
            lane = t.binary("arith.remui", row, width)
            source = t.gep("%table", t.mul(panel, t.mul("%depth", width)))
            source = t.gep(source, lane)
            out = t.gep("%out", t.mul(token.index, "%ldo"))
            with t.loop(zero, "%depth", one) as k:
                value = t.load(t.gep(source, t.mul(k.index, width)), "f32")
                t.store(value, t.gep(out, k.index), "f32")
        t.line("return")
    return str(t)
