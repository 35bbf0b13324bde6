"""The softmax of attention over one span: scores become weights in place."""

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.attention_positions import begin_in_span, end_in_span
from buddy_pipeline.compile.kernels.attention_shape import WEIGHTS_STRIDE, AttentionShape
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

SOFTMAX = "softmax"

_SOFTMAX_ARGS = [
    ("weights", "!llvm.ptr"),
    ("low", "i64"),
    ("last", "i64"),
    ("window", "i64"),
    ("to", "!llvm.ptr"),
    ("tokens", "i64"),
    ("heads", "i64"),
]


def softmax_args(values: list[str]) -> list[tuple[str, str]]:
    """Arguments of `softmax` with their types."""
    return [(v, kind) for v, (_, kind) in zip(values, _SOFTMAX_ARGS, strict=True)]


def emit_softmax(t: Text, target: Target, shape: AttentionShape) -> None:
    """`softmax(weights, low, last, window, to, tokens, heads)`: scores, in powers of two, become
    2**(score - maximum of the row) for the positions that a token sees of the span at `low`. Rows
    are tokens at last, last + 1, … × heads.

    `to` gets a vector of each row's maximum, then the sums of the weights, lane by lane. Where
    other positions share a vector with these, they get a weight of 0; all others are left alone.
    """
    lanes, vector = target.lanes, f"vector<{target.lanes}xf32>"
    with t.function(SOFTMAX, _SOFTMAX_ARGS, private=True):
        zero, one, width = t.constant(0), t.constant(1), t.constant(lanes)
        all_sums = t.gep("%to", t.mul(t.mul("%tokens", "%heads"), width))
        with t.loop(zero, "%tokens", one) as token:
            position = t.add("%last", token.index)
            first = begin_in_span(t, "%low", position, "%window")
            final = t.binary("arith.subi", end_in_span(t, "%low", position), one)
            begin = t.mul(t.binary("arith.divui", first, width), width)
            final_vector = t.mul(t.binary("arith.divui", final, width), width)
            end = t.add(final_vector, width)
            masks = [_seen(t, lanes, at, first, final) for at in (begin, final_vector)]
            rows = t.mul(token.index, "%heads")
            # Two rounds over the rows: maxima of several are then under way at once.
            with t.loop(zero, "%heads", one) as head:
                row = t.add(rows, head.index)
                scores = t.gep("%weights", t.mul(row, t.constant(WEIGHTS_STRIDE)))
                _mask(t, lanes, scores, [*zip((begin, final_vector), masks, strict=True)])
                most = _maximum(t, lanes, scores, begin, end)
                t.store(most, t.gep("%to", t.mul(row, width)), vector)
            with t.loop(zero, "%heads", one) as head:
                row = t.add(rows, head.index)
                scores = t.gep("%weights", t.mul(row, t.constant(WEIGHTS_STRIDE)))
                most = t.load(t.gep("%to", t.mul(row, width)), vector)
                total = _weigh(t, lanes, scores, begin, end, most)
                t.store(total, t.gep(all_sums, t.mul(row, width)), vector)
        t.line("return")


def _seen(t: Text, lanes: int, start: str, first: str, final: str) -> str:
    """Which of the positions start, start + 1, … lie in first … final."""
    whole, mask = f"vector<{lanes}xi32>", f"vector<{lanes}xi1>"
    numbers = ", ".join(map(str, range(lanes)))
    places = t.op(f"arith.constant dense<[{numbers}]> : {whole}")

    def relative(position: str) -> str:
        number = t.binary("arith.subi", position, start)
        return t.broadcast(t.op(f"arith.trunci {number} : i64 to i32"), whole, "i32")

    after = t.compare("sge", places, relative(first), whole)
    before = t.compare("sle", places, relative(final), whole)
    return t.binary("arith.andi", after, before, mask)


def _mask(t: Text, lanes: int, scores: str, edges: list[tuple[str, str]]) -> None:
    """Scores that the token does not see become -∞, in the vectors where such may be."""
    vector = f"vector<{lanes}xf32>"
    lowest = t.op(f"arith.constant dense<0xFF800000> : {vector}")
    for start, mask in edges:
        place = t.gep(scores, start)
        score = t.load(place, vector)
        kinds = f"vector<{lanes}xi1>, {vector}"
        t.store(t.op(f"arith.select {mask}, {score}, {lowest} : {kinds}"), place, vector)


def _maximum(t: Text, lanes: int, scores: str, begin: str, end: str) -> str:
    """The greatest score in all lanes, at least the lowest finite number: where all are -∞ their
    weights are then 0, not NaN."""
    vector = f"vector<{lanes}xf32>"
    least = t.op(f"arith.constant dense<0xFF7FFFFF> : {vector}")
    with t.loop(begin, end, t.constant(lanes), [(least, vector)]) as walk:
        score = t.load(t.gep(scores, walk.index), vector)
        walk.next = [vm.maximum(t, score, walk.carried[0], vector)]
    return vm.reduce_vector(t, walk.results[0], lanes, "max")


def _weigh(t: Text, lanes: int, scores: str, begin: str, end: str, most: str) -> str:
    """Scores become weights; returns their sums, lane by lane."""
    vector = f"vector<{lanes}xf32>"
    with t.loop(begin, end, t.constant(lanes), [(t.constant(0.0, vector), vector)]) as walk:
        place = t.gep(scores, walk.index)
        difference = t.binary("arith.subf", t.load(place, vector), most, vector)
        weight = vm.exp2_of_difference(t, difference, vm.Lanes(lanes))
        t.store(weight, place, vector)
        walk.next = [t.binary("arith.addf", walk.carried[0], weight, vector)]
    return walk.results[0]
