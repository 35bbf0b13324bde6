"""Elementary functions against float64, on dense grids and at the ends of float32."""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target
from tests.compile.harness import ROUNDOFF, aligned, assert_same_bits, load, runnable_targets

Function = Callable[[Text, str, vm.Lanes], str]

FUNCTIONS: dict[str, Function] = {
    "exp": vm.exp,
    "exp2_of_difference": vm.exp2_of_difference,
    "tanh": vm.tanh,
    "erf": vm.erf,
    "sin": vm.sin,
    "cos": vm.cos,
}
on_each_target = pytest.mark.parametrize("target", runnable_targets())
MOST = np.finfo(np.float32).max


def emit(name: str, lanes: int) -> str:
    """`map(x, y, n)`: y[i] = f(x[i]), `lanes` at a time, or one by one for 0."""
    t = Text()
    kind = vm.Lanes(lanes).of("f32")
    with t.function("map", [("x", "!llvm.ptr"), ("y", "!llvm.ptr"), ("n", "i64")]):
        with t.loop(t.constant(0), "%n", t.constant(max(1, lanes))) as i:
            x = t.load(t.gep("%x", i.index), kind)
            t.store(FUNCTIONS[name](t, x, vm.Lanes(lanes)), t.gep("%y", i.index), kind)
        t.line("return")
    return str(t)


@functools.cache
def mapping(name: str, target: Target, lanes: int) -> Callable[..., None]:
    return load(emit(name, lanes), "map", target, ("!llvm.ptr", "!llvm.ptr", "i64"))


def apply(name: str, target: Target, x: np.ndarray) -> np.ndarray:
    """f(x) in vectors; checks that scalars give the same bits."""
    padded = aligned((-(-len(x) // target.lanes) * target.lanes,), 0.0)
    padded[: len(x)] = x
    results = []
    for lanes in (target.lanes, 0):
        y = aligned(padded.shape)
        mapping(name, target, lanes)(padded, y, len(padded))
        results.append(y)
    assert_same_bits(*results)
    return results[0][: len(x)]


def exactly(name: str, x: np.ndarray) -> np.ndarray:
    """The function in float64."""
    wide = x.astype(np.float64)
    if name == "erf":
        return np.array([math.erf(v) for v in wide])
    name = name.removesuffix("_of_difference")
    with np.errstate(over="ignore", under="ignore"):
        result: np.ndarray = getattr(np, name)(wide)
    return result


def ulps(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest distance in units in the last place of the expected values."""
    unit = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    return float((np.abs(got - expected) / unit).max())


def grid(low: float, high: float, count: int = 200_001) -> np.ndarray:
    return np.linspace(low, high, count, dtype=np.float32)


@on_each_target
@pytest.mark.parametrize(
    ("name", "low", "high"), [("exp", -87.33, 88.72), ("exp2_of_difference", -126.0, 0.0)]
)
def test_exponentials_are_within_three_units_where_their_result_is_normal(
    target: Target, name: str, low: float, high: float
) -> None:
    x = np.concatenate([grid(low, high), grid(-1, 0), grid(-1e-6, 0, 1001)])
    assert ulps(apply(name, target, x), exactly(name, x)) < 3.0


@on_each_target
def test_exp2_of_a_difference_at_its_ends(target: Target) -> None:
    """0 far below, even for -∞ and whatever the rounding; 1 at 0, exactly."""
    x = np.float32([-np.inf, -MOST, -1e6, -127.5, -127.0, -126.75, 0.0, -0.0])
    y = apply("exp2_of_difference", target, x)
    assert (y[:6] == 0.0).all()
    assert (y[6:] == 1.0).all()


@on_each_target
def test_exp_at_its_ends(target: Target) -> None:
    x = np.float32([-np.inf, -MOST, -103.0, -87.34, 0.0, -0.0, 88.72283, 88.7229, MOST, np.inf])
    y = apply("exp", target, x)
    assert (y[:4] == 0.0).all()  # results that would be subnormal, too
    assert (y[4:6] == 1.0).all()
    assert abs(y[6] / np.exp(np.float64(x[6])) - 1) < 2e-7
    assert (y[7:] == np.inf).all()


@on_each_target
def test_tanh_is_within_five_units(target: Target) -> None:
    x = np.concatenate([grid(-10, 10), grid(-0.01, 0.01), grid(-1e-30, 1e-30, 101)])
    assert ulps(apply("tanh", target, x), exactly("tanh", x)) < 5.0


@on_each_target
def test_erf_is_within_six_units(target: Target) -> None:
    x = np.concatenate([grid(-5, 5, 50_001), grid(-0.01, 0.01, 20_001), grid(-1e-30, 1e-30, 101)])
    assert ulps(apply("erf", target, x), exactly("erf", x)) < 6.0


@on_each_target
@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_saturating_functions_end_at_one(target: Target, name: str) -> None:
    """erf passes it by two units on the way, between 3.5 and 4."""
    x = np.concatenate([grid(-20, 20), np.float32([-np.inf, -MOST, -4.0, 4.0, MOST, np.inf])])
    y = apply(name, target, x)
    assert np.abs(y).max() <= (1.0 if name == "tanh" else 1.0 + 4 * ROUNDOFF)
    assert (y[[-6, -5, -2, -1]] == [-1, -1, 1, 1]).all()


@on_each_target
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sine_and_cosine_are_within_1e_7_at_rotary_angles(target: Target, name: str) -> None:
    """Positions times frequencies: up to a million, and near multiples of pi/2 (which is where a
    reduction in too few bits shows)."""
    random = np.random.default_rng(0)
    multiples = (np.arange(-20000, 20000) * (np.pi / 2)).astype(np.float32)
    x = np.concatenate(
        [
            grid(-10, 10),
            grid(-1e6, 1e6),
            np.arange(131072, dtype=np.float32),
            random.uniform(0, 131072, 100_000).astype(np.float32),
            multiples,
            np.nextafter(multiples, np.float32(1e9)),
        ]
    )
    y = apply(name, target, x)
    assert np.abs(y - exactly(name, x)).max() < 1e-7
    assert np.abs(y).max() <= 1.0


@on_each_target
@pytest.mark.parametrize("name", ["sin", "cos"])
@pytest.mark.parametrize("most", [1e7, 1e9, 1e12])
def test_sine_and_cosine_are_as_accurate_far_from_zero(
    target: Target, name: str, most: float
) -> None:
    multiples = (np.linspace(-most, most, 20_001).round() * (np.pi / 2)).astype(np.float32)
    inside = multiples[np.abs(multiples) <= most]
    x = np.concatenate([grid(-most, most), inside, np.nextafter(inside, np.float32(0))])
    y = apply(name, target, x)
    assert np.abs(y - exactly(name, x)).max() < 1e-7
    assert np.abs(y).max() <= 1.0


@on_each_target
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_gives_nan(target: Target, name: str) -> None:
    payloads = np.uint32([0x7FC00000, 0xFFC00000, 0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0x7FBFFFFF])
    assert np.isnan(apply(name, target, payloads.view(np.float32))).all()


@on_each_target
@pytest.mark.parametrize("name", ["sin", "cos"])
def test_infinity_has_no_sine(target: Target, name: str) -> None:
    assert np.isnan(apply(name, target, np.float32([np.inf, -np.inf]))).all()


@on_each_target
@pytest.mark.parametrize("name", ["tanh", "erf"])
def test_odd_functions_keep_the_sign_of_zero(target: Target, name: str) -> None:
    y = apply(name, target, np.float32([0.0, -0.0]))
    assert (y == 0.0).all() and (np.signbit(y) == [False, True]).all()


@on_each_target
@pytest.mark.parametrize("combine", ["max", "sum"])
def test_reductions_give_every_lane_the_same_total(target: Target, combine: str) -> None:
    t = Text()
    vector = f"vector<{target.lanes}xf32>"
    with t.function("reduce", [("x", "!llvm.ptr"), ("y", "!llvm.ptr")]):
        total = vm.reduce_vector(t, t.load("%x", vector), target.lanes, combine)
        t.store(total, "%y", vector)
        t.line("return")
    reduce = load(str(t), "reduce", target, ("!llvm.ptr", "!llvm.ptr"))
    random = np.random.default_rng(0)
    for _ in range(20):
        x, y = aligned((target.lanes,)), aligned((target.lanes,))
        x[:] = random.integers(-100, 100, target.lanes)
        reduce(x, y)
        assert (y == (x.max() if combine == "max" else x.sum())).all()
