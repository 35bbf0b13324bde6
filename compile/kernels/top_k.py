"""The top-k kernel: where the greatest elements of a row lie, such as a token's experts."""

from buddy_pipeline.compile.kernels.step import thread_share
from buddy_pipeline.compile.mlir_text import Text

TOP_K = "bp_top_k"

#: Argument names and types: activations and their token stride, rows of each token (one after the
#: other) and elements of each, int64 output and its token stride, how many are wanted of a row,
#: tokens, thread id and team.
SIGNATURE = [
    ("x", "!llvm.ptr"),
    ("ldx", "i64"),
    ("rows", "i64"),
    ("width", "i64"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("count", "i64"),
    ("tokens", "i64"),
    ("tid", "i64"),
    ("team", "i64"),
]


def emit_top_k() -> str:
    """MLIR text of the kernel: the places of the `count` greatest elements of each row, greatest
    first, of equal ones the first. Elements are ordered as IEEE 754's totalOrder has them, so that
    each place is one of the row's, and none comes twice, also where there are NaNs."""
    t = Text()
    with t.function(TOP_K, SIGNATURE):
        zero, one = t.constant(0), t.constant(1)
        low, high = thread_share(t, "%tokens", "%tid", "%team")
        with t.loop(low, high, one) as token:
            x = t.gep("%x", t.mul(token.index, "%ldx"))
            out = t.gep("%out", t.mul(token.index, "%ldo"), "i64")
            with t.loop(zero, "%rows", one) as row:
                source = t.gep(x, t.mul(row.index, "%width"))
                to = t.gep(out, t.mul(row.index, "%count"), "i64")
                # Above every key; the place does not count then.
                start = [(t.constant(1 << 32), "i64"), (zero, "i64")]
                with t.loop(zero, "%count", one, start) as number:
                    key, place = _greatest_behind(t, source, *number.carried)
                    t.store(place, t.gep(to, number.index, "i64"), "i64", 8)
                    number.next = [key, place]
        t.line("return")
    return str(t)


def _greatest_behind(t: Text, row: str, key: str, place: str) -> tuple[str, str]:
    """Key and place of the first element, in order of choice, behind the one with these."""
    start = [(t.constant(-(1 << 32)), "i64"), (t.constant(0), "i64")]
    with t.loop(t.constant(0), "%width", t.constant(1), start) as i:
        best, best_place = i.carried
        own = _ordered(t, t.load(t.gep(row, i.index), "i32"))
        is_later = t.binary(
            "arith.andi",
            t.compare("eq", own, key),
            t.compare("sgt", i.index, place),
            "i1",
        )
        is_behind = t.binary("arith.ori", t.compare("slt", own, key), is_later, "i1")
        is_best = t.binary("arith.andi", is_behind, t.compare("sgt", own, best), "i1")
        i.next = [
            t.select(is_best, own, best, "i64"),
            t.select(is_best, i.index, best_place, "i64"),
        ]
    found, found_place = i.results
    return found, found_place


def _ordered(t: Text, bits: str) -> str:
    """The bits of a float as an integer that is ordered as floats are, i64."""
    sign = t.binary("arith.shrsi", bits, t.constant(31, "i32"), "i32")
    flip = t.binary("arith.andi", sign, t.constant(0x7FFFFFFF, "i32"), "i32")
    return t.op(f"arith.extsi {t.binary('arith.xori', bits, flip, 'i32')} : i32 to i64")
