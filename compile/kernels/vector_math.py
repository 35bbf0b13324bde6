"""Elementary functions as straight-line arithmetic, for scalars and vectors of f32 alike.

Calls of libm would keep loops scalar, so `exp`, `tanh`, `erf`, `sin` and `cos` are written out as
polynomials. Errors are a few units in the last place (tests compare with float64).
"""

from dataclasses import dataclass

from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


@dataclass(frozen=True)
class Lanes:
    """The types that one function is written in: scalars (`lanes` = 0) or vectors."""

    lanes: int

    def of(self, element: str) -> str:
        """The type with this element."""
        return f"vector<{self.lanes}x{element}>" if self.lanes else element


def exp(t: Text, x: str, lanes: Lanes) -> str:
    """e**x: 0 below -87.3 (no subnormal results), infinity above 88.7, NaN for NaN.

    x = n·ln 2 + r with |r| ≤ ln 2 / 2 and a degree-6 Taylor polynomial in r after Cody and Waite's
    two-part reduction (Cephes `expf` has the same shape).
    """
    f, i = lanes.of("f32"), lanes.of("i32")
    low, high = t.constant(-87.3365478515625, f), t.constant(88.72283172607422, f)
    clamped = _clamp(t, x, low, high, f)
    n = _round(t, t.binary("arith.mulf", clamped, t.constant(LOG2_E, f), f), f)
    y = _exp_polynomial(t, n, clamped, f)
    # 2**n in two factors, so that n = 128 does not leave the exponent's range.
    whole = t.op(f"arith.fptosi {n} : {f} to {i}")
    half = t.binary("arith.shrsi", whole, t.constant(1, i), i)
    for part in (half, t.binary("arith.subi", whole, half, i)):
        y = t.binary("arith.mulf", y, _power_of_two(t, part, lanes), f)
    y = _where(t, "olt", x, low, t.constant(0.0, f), y, f)
    infinity = t.op(f"arith.constant {_infinity(lanes)} : {f}")
    y = _where(t, "ogt", x, high, infinity, y, f)
    return _where(t, "uno", x, x, x, y, f)


def exp2_of_difference(t: Text, x: str, lanes: Lanes) -> str:
    """2**x for x ≤ 0 or -∞, as a softmax needs it: half the operations of `exp`.

    0 below -126.5 (and 1 at 0, exactly); NaN stays NaN. x = n + r with |r| ≤ 1/2: the rounding
    happens in an addition of 1.5·2²³ + 127, which leaves the biased exponent of 2**n in the low
    bits. 2**r is 1 + a polynomial in r without constant term, of least relative error (1e-7).
    """
    f, i = lanes.of("f32"), lanes.of("i32")
    magic = t.constant(12583039.0, f)
    # At -127 the biased exponent is 0, and with it the power of two.
    c = maximum(t, t.constant(-127.0, f), x, f)
    shifted = t.binary("arith.addf", c, magic, f)
    r = t.binary("arith.subf", c, t.binary("arith.subf", shifted, magic, f), f)
    bits = t.op(f"arith.bitcast {shifted} : {f} to {i}")
    bits = t.binary("arith.shli", bits, t.constant(23, i), i)
    power = t.op(f"arith.bitcast {bits} : {i} to {f}")
    # A product, not a sum of bits: that would make numbers of some NaNs.
    return t.binary("arith.mulf", _polynomial(t, r, _EXP2, f), power, f)


def _exp_polynomial(t: Text, n: str, x: str, f: str) -> str:
    """e**(x - n·ln 2), near 1."""
    r = _fma(t, n, t.constant(-0.693145751953125, f), x, f)
    r = _fma(t, n, t.constant(-1.428606765330187e-06, f), r, f)
    y = t.constant(1.0 / 720, f)
    for coefficient in (1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
        y = _fma(t, y, r, t.constant(coefficient, f), f)
    return y


def tanh(t: Text, x: str, lanes: Lanes) -> str:
    """tanh x as the odd rational function of degree 13/6 that Eigen uses, on |x| ≤ 7.9988."""
    f = lanes.of("f32")
    bound = 7.99881172180175781
    c = _clamp(t, x, t.constant(-bound, f), t.constant(bound, f), f)
    square = t.binary("arith.mulf", c, c, f)
    top = _polynomial(t, square, _TANH_TOP, f)
    bottom = _polynomial(t, square, _TANH_BOTTOM, f)
    ratio = t.binary("arith.divf", t.binary("arith.mulf", c, top, f), bottom, f)
    # Below this size the quotient's rounding is larger than tanh x - x.
    size = t.op(f"math.absf {x} : {f}")
    ratio = _where(t, "olt", size, t.constant(0.0004, f), x, ratio, f)
    return _where(t, "uno", x, x, x, ratio, f)


def erf(t: Text, x: str, lanes: Lanes) -> str:
    """erf x as the odd rational function of degree 13/8 that XLA and Eigen use, on |x| ≤ 4."""
    f = lanes.of("f32")
    c = _clamp(t, x, t.constant(-4.0, f), t.constant(4.0, f), f)
    square = t.binary("arith.mulf", c, c, f)
    top = _polynomial(t, square, _ERF_TOP, f)
    bottom = _polynomial(t, square, _ERF_BOTTOM, f)
    y = t.binary("arith.divf", t.binary("arith.mulf", c, top, f), bottom, f)
    return _where(t, "uno", x, x, x, y, f)


def sin(t: Text, x: str, lanes: Lanes) -> str:
    """sin x within 1e-7 absolute for |x| up to 10¹², which no model's rotary angles come near; less
    accurate above. NaN for infinities."""
    return _sine(t, x, lanes, quarter=0)


def cos(t: Text, x: str, lanes: Lanes) -> str:
    """cos x, as `sin`."""
    return _sine(t, x, lanes, quarter=1)


def _sine(t: Text, x: str, lanes: Lanes, quarter: int) -> str:
    """sin(x + quarter·π/2): x = n·π/2 + r by a two-part fused reduction, then the polynomial of
    sine or cosine on |r| ≤ π/4 (coefficients of Cephes `sinf` and `cosf`), chosen by n mod 4.

    The reduction is in f64: f32 has too few bits for n from 10⁷ on, however many its parts are.
    """
    f, d, i, mask = (lanes.of(element) for element in ("f32", "f64", "i32", "i1"))
    r = t.op(f"arith.extf {x} : {f} to {d}")
    n = _round(t, t.binary("arith.mulf", r, t.constant(0.6366197723675814, d), d), d)
    for part in (-1.5707963267948966, -6.123233995736766e-17):
        r = _fma(t, n, t.constant(part, d), r, d)
    r = t.op(f"arith.truncf {r} : {d} to {f}")
    # Only n mod 4 counts, and n itself may not fit an integer.
    turns = _round(t, t.binary("arith.mulf", n, t.constant(0.25, d), d), d)
    n = _fma(t, turns, t.constant(-4.0, d), n, d)
    square = t.binary("arith.mulf", r, r, f)
    s = _polynomial(t, square, (-1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4), f)
    s = _fma(t, t.binary("arith.mulf", s, square, f), r, r, f)
    c = _polynomial(
        t, square, (4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5), f
    )
    c = t.binary("arith.mulf", t.binary("arith.mulf", c, square, f), square, f)
    c = t.binary("arith.addf", _fma(t, square, t.constant(-0.5, f), c, f), t.constant(1.0, f), f)
    turn = t.binary("arith.addi", t.op(f"arith.fptosi {n} : {d} to {i}"), t.constant(quarter, i), i)
    zero = t.constant(0, i)
    odd = t.compare("ne", t.binary("arith.andi", turn, t.constant(1, i), i), zero, i)
    y = t.op(
        f"arith.select {odd}, {c}, {s} : {mask}, {f}"
        if lanes.lanes
        else f"arith.select {odd}, {c}, {s} : {f}"
    )
    negative = t.compare("ne", t.binary("arith.andi", turn, t.constant(2, i), i), zero, i)
    minus = t.op(f"arith.negf {y} : {f}")
    return t.op(
        f"arith.select {negative}, {minus}, {y} : {mask}, {f}"
        if lanes.lanes
        else f"arith.select {negative}, {minus}, {y} : {f}"
    )


def maximum(t: Text, left: str, right: str, kind: str) -> str:
    """The larger of two; `right` when either is NaN (one instruction on x86)."""
    return _where(t, "ogt", left, right, left, right, kind)


def reduce_vector(t: Text, vector: str, lanes: int, combine: str) -> str:
    """Combines all lanes by halves in a fixed order; every lane of the result holds the total.

    `combine` is "max" or "sum".
    """
    kind = f"vector<{lanes}xf32>"
    step = lanes // 2
    while step:
        order = ", ".join(str(lane ^ step) for lane in range(lanes))
        other = t.op(f"vector.shuffle {vector}, {vector} [{order}] : {kind}, {kind}")
        if combine == "max":
            vector = maximum(t, vector, other, kind)
        else:
            vector = t.binary("arith.addf", vector, other, kind)
        step //= 2
    return vector


LOG2_E = 1.4426950408889634
#: 1.5 · 2²³: adding it rounds a small float to an integer and leaves that in its low bits.
INTEGER_MAGIC = 12582912.0


def tiny_block(full: int) -> float:
    """A block of integers up to `full` whose largest value is below this is taken for zeros: `full`
    over it might overflow."""
    return full * 2.0**-127


def integer_scale(t: Text, bits: str, full: int) -> tuple[str, str]:
    """The scale max / full of a block of integers and its inverse, which is 0 for a block of zeros.

    `bits` is the largest |x| of the block as an i32, in whose order a NaN is above all numbers. For
    an infinity or a NaN the scale is NaN, and so is whatever it multiplies.
    """
    largest = t.op(f"arith.bitcast {bits} : i32 to f32")
    whole, zero = t.constant(float(full), "f32"), t.constant(0.0, "f32")
    scale = t.fma(largest, zero, t.binary("arith.divf", largest, whole, "f32"), "f32")
    inverse = t.binary("arith.divf", whole, largest, "f32")
    tiny = t.op(f"arith.cmpf olt, {largest}, {t.constant(tiny_block(full), 'f32')} : f32")
    return scale, t.select(tiny, zero, inverse, "f32")


def narrowed(t: Text, x: str, element: str, lanes: Lanes, target: Target) -> str:
    """f32 rounded to the nearest `element` ("f32", "bf16" or "f16"), ties to even.

    Only a CPU that multiplies bf16 also converts to it; elsewhere LLVM would call a library.
    """
    if element == "f32":
        return x
    f, narrow = lanes.of("f32"), lanes.of(element)
    if element == "f16" or target.bf16_dot:
        return t.op(f"arith.truncf {x} : {f} to {narrow}")
    i, half = lanes.of("i32"), lanes.of("i16")
    bits = t.op(f"arith.bitcast {x} : {f} to {i}")
    sixteen = t.constant(16, i)
    odd = t.binary("arith.andi", t.binary("arith.shrui", bits, sixteen, i), t.constant(1, i), i)
    upper = t.binary("arith.addi", bits, t.constant(0x7FFF, i), i)
    upper = t.binary("arith.shrui", t.binary("arith.addi", upper, odd, i), sixteen, i)
    # The sum would carry a NaN's payload into its exponent.
    nan = t.op(f"arith.cmpf uno, {x}, {x} : {f}")
    kinds = f"{lanes.of('i1')}, {i}" if lanes.lanes else i
    upper = t.op(f"arith.select {nan}, {t.constant(0x7FC0, i)}, {upper} : {kinds}")
    upper = t.op(f"arith.trunci {upper} : {i} to {half}")
    return t.op(f"arith.bitcast {upper} : {half} to {narrow}")


_EXP2 = (
    1.0,
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472731307149,
)
_TANH_TOP = (
    4.89352455891786e-03,
    6.37261928875436e-04,
    1.48572235717979e-05,
    5.12229709037114e-08,
    -8.60467152213735e-11,
    2.00018790482477e-13,
    -2.76076847742355e-16,
)
_TANH_BOTTOM = (
    4.89352518554385e-03,
    2.26843463243900e-03,
    1.18534705686654e-04,
    1.19825839466702e-06,
)
_ERF_TOP = (
    -1.60960333262415e-02,
    -2.95459980854025e-03,
    -7.34990630326855e-04,
    -5.69250639462346e-05,
    -2.10102402082508e-06,
    2.77068142495902e-08,
    -2.72614225801306e-10,
)
_ERF_BOTTOM = (
    -1.42647390514189e-02,
    -7.37332916720468e-03,
    -1.68282697438203e-03,
    -2.13374055278905e-04,
    -1.45660718464996e-05,
)


def _polynomial(t: Text, x: str, coefficients: tuple[float, ...], kind: str) -> str:
    """c0 + c1·x + c2·x² + … by Horner's rule."""
    y = t.constant(coefficients[-1], kind)
    for coefficient in reversed(coefficients[:-1]):
        y = _fma(t, y, x, t.constant(coefficient, kind), kind)
    return y


def _fma(t: Text, a: str, b: str, c: str, kind: str) -> str:
    return t.op(f"math.fma {a}, {b}, {c} : {kind}")


def _round(t: Text, x: str, kind: str) -> str:
    return t.op(f"math.roundeven {x} : {kind}")


def _where(t: Text, predicate: str, a: str, b: str, yes: str, no: str, kind: str) -> str:
    """`yes` where `a predicate b` holds, lane by lane."""
    condition = t.op(f"arith.cmpf {predicate}, {a}, {b} : {kind}")
    mask = kind.replace("xf32", "xi1") if kind.startswith("vector") else "i1"
    types = f"{mask}, {kind}" if kind.startswith("vector") else kind
    return t.op(f"arith.select {condition}, {yes}, {no} : {types}")


def _clamp(t: Text, x: str, low: str, high: str, kind: str) -> str:
    return _where(t, "olt", maximum(t, x, low, kind), high, maximum(t, x, low, kind), high, kind)


def _power_of_two(t: Text, n: str, lanes: Lanes) -> str:
    """2**n for an integer n within the exponent's range, made from its bits."""
    f, i = lanes.of("f32"), lanes.of("i32")
    biased = t.binary("arith.addi", n, t.constant(127, i), i)
    bits = t.binary("arith.shli", biased, t.constant(23, i), i)
    return t.op(f"arith.bitcast {bits} : {i} to {f}")


def _infinity(lanes: Lanes) -> str:
    return "dense<0x7F800000>" if lanes.lanes else "0x7F800000"
