"""The outer pieces of attention: merging partial results of spans, and the output at the end."""

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.attention_shape import AttentionShape, Rows
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


def emit_merge(t: Text, target: Target, shape: AttentionShape, rows: int) -> None:
    """`merge_R(state, part)`: state becomes the softmax over the positions of both."""
    lanes, vector = target.lanes, f"vector<{target.lanes}xf32>"
    pack = vm.Lanes(lanes)
    with t.function(f"merge_{rows}", [("state", "!llvm.ptr"), ("part", "!llvm.ptr")], private=True):
        stride = shape.value_stride
        for r in range(rows):
            at = [rows * stride + r * lanes, rows * stride + (rows + r) * lanes]
            (old_max, old_sum), (new_max, new_sum) = (
                [t.load(t.gep(side, place), vector) for place in at] for side in ("%state", "%part")
            )
            most = vm.maximum(t, old_max, new_max, vector)
            old = vm.exp2_of_difference(t, t.binary("arith.subf", old_max, most, vector), pack)
            new = vm.exp2_of_difference(t, t.binary("arith.subf", new_max, most, vector), pack)

            def blend(left: str, right: str, old: str = old, new: str = new) -> str:
                return t.fma(right, new, t.binary("arith.mulf", left, old, vector), vector)

            t.store(most, t.gep("%state", at[0]), vector)
            t.store(blend(old_sum, new_sum), t.gep("%state", at[1]), vector)
            for c in range(0, stride, lanes):
                place = t.gep("%state", r * stride + c)
                left = t.load(place, vector)
                right = t.load(t.gep("%part", r * stride + c), vector)
                t.store(blend(left, right), place, vector)
        t.line("return")


_FINISH_ARGS = [
    ("state", "!llvm.ptr"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("sinks", "!llvm.ptr"),
]


def finish_args(values: list[str]) -> list[tuple[str, str]]:
    """Arguments of a finish function with their types."""
    return [(v, kind) for v, (_, kind) in zip(values, _FINISH_ARGS, strict=True)]


def emit_finish(t: Text, target: Target, shape: AttentionShape, rows: Rows) -> None:
    """`finish_NxH(state, out, ldo, sinks)`: outputs times the inverse of the sum of their weights
    (dividing each vector took a tenth of a prefill)."""
    lanes, vector = target.lanes, f"vector<{target.lanes}xf32>"
    with t.function(f"finish_{rows.name}", _FINISH_ARGS, private=True):
        stride = shape.value_stride
        outs = ["%out"]
        for _ in range(1, rows.tokens):
            outs.append(t.gep(outs[-1], "%ldo"))
        for r, (token, head) in enumerate(rows.pairs()):
            place = rows.count * stride + (rows.count + r) * lanes
            total = vm.reduce_vector(t, t.load(t.gep("%state", place), vector), lanes, "sum")
            shrunk = ""
            if shape.sinks:
                most = t.load(t.gep("%state", rows.count * stride + r * lanes), vector)
                total, shrunk = _with_sink(t, t.gep("%sinks", head), most, total, lanes)
            one = t.constant(1.0, "f32")
            total = t.op(f"vector.extract {total}[0] : f32 from {vector}")
            inverse = t.broadcast(t.binary("arith.divf", one, total, "f32"), vector)
            out = t.gep(outs[token], head * shape.value)
            for c in range(0, shape.value, lanes):
                value = t.load(t.gep("%state", r * stride + c), vector)
                if shape.sinks:
                    value = t.binary("arith.mulf", value, shrunk, vector)
                value = t.binary("arith.mulf", value, inverse, vector)
                _store_part(t, value, out, c, shape, lanes)
        t.line("return")


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


def _with_sink(t: Text, sink: str, most: str, total: str, lanes: int) -> tuple[str, str]:
    """The sum of weights with that of a sink, and the factor that it shrinks outputs by: where the
    sink's score is above all others it takes the place of the maximum."""
    vector, pack = f"vector<{lanes}xf32>", vm.Lanes(lanes)
    score = t.binary("arith.mulf", t.load(sink, "f32"), t.constant(vm.LOG2_E, "f32"), "f32")
    score = t.broadcast(score, vector)
    highest = vm.maximum(t, score, most, vector)
    factor = vm.exp2_of_difference(t, t.binary("arith.subf", most, highest, vector), pack)
    weight = vm.exp2_of_difference(t, t.binary("arith.subf", score, highest, vector), pack)
    return t.fma(total, factor, weight, vector), factor
