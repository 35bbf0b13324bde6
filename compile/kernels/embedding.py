"""The embedding kernel: gathers one row of a packed table for each token.

The table has the layout of a linear's weights, so that a tied head and the embedding share memory.
"""

from buddy_pipeline.compile.formats.base import WeightFormat, head_bytes
from buddy_pipeline.compile.kernels.step import thread_share
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

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


def embedding_name(form: WeightFormat) -> str:
    """The kernel's symbol."""
    return f"bp_embedding_{form.name}"


def emit_embedding(target: Target, form: WeightFormat) -> str:
    """MLIR text of the kernel: out[t][k] = table[ids[t · ldi]][k] for k below `depth`."""
    t = Text()
    with t.function(embedding_name(form), SIGNATURE):
        zero, one, width = t.constant(0), t.constant(1), t.constant(target.panel)
        unit, unit_bytes = t.constant(form.unit), t.constant(form.unit_bytes(target.panel))
        units = t.binary("arith.divui", t.add("%depth", t.constant(form.unit - 1)), unit)
        head = t.constant(head_bytes(form, target.panel))
        panel_bytes = t.add(t.mul(units, unit_bytes), head)
        low, high = thread_share(t, "%tokens", "%tid", "%team")
        with t.loop(low, high, one) as token:
            row = t.word(t.gep("%ids", t.mul(token.index, "%ldi"), "i64"), 0)
            panel = t.binary("arith.divui", row, width)
            lane = t.binary("arith.remui", row, width)
            scales = t.gep("%table", t.mul(panel, panel_bytes), "i8")
            source = t.gep(scales, head_bytes(form, target.panel), "i8")
            out = t.gep("%out", t.mul(token.index, "%ldo"))
            with t.loop(zero, units, one) as number:
                k = t.mul(number.index, unit)
                base = t.gep(source, t.mul(number.index, unit_bytes), "i8")
                left = t.binary("arith.subi", "%depth", k)
                form.emit_values(t, target, base, lane, t.gep(out, k), left)
            if form.scaled:
                scale = t.load(t.gep(scales, lane), "f32")
                with t.loop(zero, "%depth", one) as element:
                    place = t.gep(out, element.index)
                    value = t.binary("arith.mulf", t.load(place, "f32"), scale, "f32")
                    t.store(value, place, "f32")
        t.line("return")
    return str(t)
