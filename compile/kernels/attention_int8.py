"""Keys and values as bytes with scales.

In int8 a cached number is q · max|x| / 127 over a block of 32 elements, which are of one head at
one position, so it depends on that token's sequence alone. A block with a NaN or an infinity
becomes all NaN.
"""

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.manifest import KV_SCALE_BLOCK
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


def store_int8(
    t: Text,
    target: Target,
    source: str,
    count: int,
    to: tuple[str, int],
    scales: tuple[str, int],
) -> None:
    """Quantises `count` f32 at `source`.

    `to` is where the bytes go and how far apart, `scales` the same for the scales (f32).
    """
    place, step = to
    for first in range(0, count, KV_SCALE_BLOCK):
        size = min(KV_SCALE_BLOCK, count - first)
        block = t.gep(source, first)
        scale, inverse = _scale(t, target, block, size)
        t.store(scale, t.gep(scales[0], first // KV_SCALE_BLOCK * scales[1]), "f32")
        begin = t.gep(place, first * step, "i8")
        lanes = target.lanes if step == 1 else 0
        whole = size // lanes * lanes if lanes else 0
        for at in range(0, whole, lanes or 1):
            _store(t, t.gep(block, at), t.gep(begin, at, "i8"), inverse, lanes)
        with t.loop(t.constant(whole), t.constant(size), t.constant(1)) as rest:
            at_rest = t.gep(begin, t.mul(rest.index, t.constant(step)), "i8")
            _store(t, t.gep(block, rest.index), at_rest, inverse, 0)


def _store(t: Text, source: str, to: str, inverse: str, lanes: int) -> None:
    """Rounds x · inverse to the nearest integer, ties to even; one element or a vector of them."""
    f, i, byte = (f"vector<{lanes}x{e}>" if lanes else e for e in ("f32", "i32", "i8"))
    factor = t.broadcast(inverse, f) if lanes else inverse
    shifted = t.fma(t.load(source, f), factor, t.constant(vm.INTEGER_MAGIC, f), f)
    bits = t.op(f"arith.bitcast {shifted} : {f} to {i}")
    t.store(t.op(f"arith.trunci {bits} : {i} to {byte}"), to, byte, 1)


def _scale(t: Text, target: Target, block: str, size: int) -> tuple[str, str]:
    """max|x| / 127 over a block and its inverse, which is 0 for a block of zeros.

    Absolute values are compared as integers, in whose order a NaN is above all numbers.
    """
    lanes = target.lanes
    whole = size // lanes * lanes
    largest = t.constant(0, "i32")
    if whole:
        kind = f"vector<{lanes}xi32>"
        most = t.constant(0, kind)
        for at in range(0, whole, lanes):
            most = t.binary("arith.maxsi", most, _magnitude(t, t.gep(block, at), kind), kind)
        largest = t.op(f"vector.reduction <maxsi>, {most} : {kind} into i32")
    one = t.constant(1)
    start = [(largest, "i32")]
    with t.loop(t.constant(whole), t.constant(size), one, start) as rest:
        element = _magnitude(t, t.gep(block, rest.index), "i32")
        rest.next = [t.binary("arith.maxsi", rest.carried[0], element, "i32")]
    return vm.integer_scale(t, rest.results[0], full=127)


def _magnitude(t: Text, source: str, kind: str) -> str:
    """The bits of |x|."""
    return t.binary("arith.andi", t.load(source, kind), t.constant(0x7FFFFFFF, kind), kind)
