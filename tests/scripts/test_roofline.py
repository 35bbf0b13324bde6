"""The loops that measure the machine do the work that they are said to do."""

import os

import numpy as np
import pytest
import roofline

from benchkit.child import child, run_in_child
from benchkit.command import whole_numbers
from benchkit.limits import LimitMeter, Limits, Objects, compile_loops
from benchkit.reference_loops import CLoops, c_loops
from benchkit.report import table
from benchkit.roofline_kernels import FMA_F32, READS, emit_read, fma_bf16, fma_f32
from buddy_pipeline.compile.target import host_target, named_target
from buddy_pipeline.partition.errors import UserError


@pytest.fixture(scope="module")
def objects() -> Objects:
    return run_in_child("the compiler", compile_loops, host_target())


@pytest.mark.parametrize("loop", READS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_element_is_read_by_some_thread(objects: Objects, threads: int, loop: str) -> None:
    meter = LimitMeter(objects, threads, megabytes=1)
    meter.data[:] = 0.0
    meter.data[0] = meter.data[-1] = meter.data.size / 2
    assert meter.read_seconds(loop) > 0


@pytest.mark.parametrize("loop", READS)
def test_a_loop_that_reads_less_is_found_out(objects: Objects, loop: str) -> None:
    meter = LimitMeter(objects, 1, megabytes=1)
    meter.data[-100:] = 0.0
    with pytest.raises(RuntimeError, match="the reading loop summed"):
        meter.read_seconds(loop)


def test_every_thread_adds_up_its_chains(objects: Objects) -> None:
    meter = LimitMeter(objects, 2, megabytes=1)
    assert meter.flops_per_s(FMA_F32, 1) > 0


@pytest.mark.parametrize("cpu", ["x86-64-v4", "x86-64-v3", "aarch64"])
def test_loops_are_vectors_on_independent_chains(cpu: str) -> None:
    target = named_target(cpu)
    loop = fma_f32(target)
    assert loop.text.count("math.fma") == loop.flops // (2 * target.lanes)
    assert loop.flops // (2 * target.lanes) >= 8, "fewer chains than a core's latency hides"
    assert f"vector<{target.lanes}xf32>" in emit_read(target, "roofline_read")
    assert "prefetch" not in emit_read(target, "roofline_read")
    assert emit_read(target, "roofline_read_ahead").count("llvm.intr.prefetch") == 8 // (
        64 // (target.vector_bits // 8)
    )
    assert fma_bf16(target) is None


def test_limits_keep_the_best_of_each() -> None:
    first, second = Limits(2, 10.0, 5.0, None), Limits(2, 8.0, 7.0, 9.0)
    assert first.best(second) == second.best(first) == Limits(2, 10.0, 7.0, 9.0)


def test_figures_that_do_not_fit_together_are_named() -> None:
    numpy = {"read_bytes_per_s_one_thread": 9e9}
    ours = {"threads": 1, "read_bytes_per_s": 10e9, "f32_flops_per_s": 100e9}
    good = {"ours": ours, "c": {"read_bytes_per_s": 11e9, "f32_flops_per_s": 99e9}, "numpy": numpy}
    assert roofline.implausible(good) == []
    assert roofline.implausible({**good, "c": None}) == []
    slow = {**good, "c": {"read_bytes_per_s": 20e9, "f32_flops_per_s": 50e9}}
    assert len(roofline.implausible(slow)) == 2
    odd = {**good, "numpy": {"read_bytes_per_s_one_thread": 20e9}}
    assert roofline.implausible(odd) == ["1 threads: NumPy reads faster, 20.0 GB/s"]


def test_the_c_loops_measure_something() -> None:
    loops = c_loops(host_target().vector_bits)
    if loops is None:
        pytest.skip("no gcc")
    assert isinstance(loops, CLoops)
    memory = np.ones((1 << 18) + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    assert loops.read(memory[start : start + (1 << 18)], 2, 1) > 0


def test_lists_of_numbers_are_checked() -> None:
    assert whole_numbers("--threads", "1,2") == (1, 2)
    for text in ("", "0", "1,x", "-1"):
        with pytest.raises(UserError, match="--threads"):
            whole_numbers("--threads", text)


def test_a_table_aligns_names_left_and_figures_right() -> None:
    assert table(("a", "b"), [("long", "1"), ("x", "22")]).splitlines() == [
        "a      b",
        "----  --",
        "long   1",
        "x     22",
    ]


class Failing:
    def user_mistake(self) -> None:
        raise UserError("give another value")

    def die(self) -> None:
        os._exit(3)


def test_a_child_hands_on_a_mistake_and_its_death_is_told() -> None:
    with child("x", Failing) as process:
        with pytest.raises(UserError, match="give another value"):
            process.call("user_mistake")
        with pytest.raises(RuntimeError, match="the process of x died"):
            process.call("die")
