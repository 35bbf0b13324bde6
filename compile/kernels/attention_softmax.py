"""The softmax of attention over one span: scores become weights in place."""

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.attention_shape import WEIGHTS_STRIDE, Rows
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

_SOFTMAX_ARGS = [
    ("weights", "!llvm.ptr"),
    ("first", "i64"),
    ("end", "i64"),
    ("to", "!llvm.ptr"),
]


def softmax_args(values: list[str]) -> list[tuple[str, str]]:
    """Arguments of a `softmax` function with their types."""
    return [(v, kind) for v, (_, kind) in zip(values, _SOFTMAX_ARGS, strict=True)]


def emit_softmax(t: Text, target: Target, rows: Rows) -> None:
    """`softmax_NxH(weights, first, end, to)`: scores, in powers of two, become 2**(score - maximum
    of the row) for the places first … end - 1 of a span, and for others that share a vector.

    `to` has each row's greatest scores, lane by lane; it gets the greatest of them in all lanes,
    and behind these vectors the sums of the rows' weights, lane by lane.
    """
    lanes, vector = target.lanes, f"vector<{target.lanes}xf32>"
    with t.function(f"softmax_{rows.name}", _SOFTMAX_ARGS, private=True):
        maxima = [t.gep("%to", r * lanes) for r in range(rows.count)]
        for place in maxima:
            t.store(vm.reduce_vector(t, t.load(place, vector), lanes, "max"), place, vector)
        width = t.constant(lanes)
        begin = t.mul(t.binary("arith.divui", "%first", width), width)
        begun = [(t.constant(0.0, vector), vector)] * rows.count
        # All rows in one loop: it ends, unforeseen, once a tile, and their chains are independent.
        with t.loop(begin, "%end", width, begun) as walk:
            for r, total in enumerate(walk.carried):
                place = t.gep("%weights", walk.index)
                place = t.gep(place, r * WEIGHTS_STRIDE)
                score, most = t.load(place, vector), t.load(maxima[r], vector)
                difference = t.binary("arith.subf", score, most, vector)
                weight = vm.exp2_of_difference(t, difference, vm.Lanes(lanes))
                t.store(weight, place, vector)
                walk.next.append(t.binary("arith.addf", total, weight, vector))
        for r, total in enumerate(walk.results):
            t.store(total, t.gep("%to", (rows.count + r) * lanes), vector)
        t.line("return")
