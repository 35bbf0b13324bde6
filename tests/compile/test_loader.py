"""Objects become callable code in this process, and find LLVM's OpenMP runtime whatever else the
process has loaded."""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from buddy_pipeline.compile import loader
from buddy_pipeline.compile.codegen import compile_object
from buddy_pipeline.compile.kernels.driver import DRIVER, emit_driver
from buddy_pipeline.compile.loader import Library, load_openmp
from buddy_pipeline.compile.lowering import lower_kernel
from buddy_pipeline.compile.manifest import StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.partition.errors import UserError

TEAM = 3
_ROOT = Path(__file__).parents[2]


def thread_numbers() -> list[int]:
    """What each thread of a team is told to be, in the order of those numbers."""
    target = host_target()
    t = Text()
    args = [("args", "!llvm.ptr"), ("step", "!llvm.ptr"), ("tid", "i64")]
    with t.function("count", args):
        place = t.gep(t.word("%args", 0, "!llvm.ptr"), "%tid", "i64")
        t.op(f"llvm.atomicrmw add {place}, {t.constant(1)} acq_rel : !llvm.ptr, i64")
        t.line("return")
    sources = {DRIVER: emit_driver(target), "count": str(t)}
    objects = [compile_object([lower_kernel(text)], n, target) for n, text in sources.items()]
    library = Library(objects, list(sources))
    driver = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(
        library.address(DRIVER)
    )
    calls = np.zeros(TEAM, np.int64)
    words = np.array([calls.ctypes.data], np.int64)
    pair = np.array([library.address("count"), words.ctypes.data], np.int64)
    record = np.zeros(len(StepWord), np.int64)
    record[StepWord.TEAM.value] = TEAM
    driver(pair.ctypes.data, 1, record.ctypes.data)
    return calls.tolist()


@pytest.mark.parametrize("others", ["pass", "import torch"])
def test_every_thread_of_a_team_has_a_number_of_its_own(others: str) -> None:
    """torch brings GNU's OpenMP runtime, which knows nothing of our threads."""
    program = f"{others}; from tests.compile.test_loader import thread_numbers as f; print(f())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=_ROOT)
    assert run.stdout.split("\n")[0] == str([1] * TEAM), run.stderr


def adder(symbol: str, calls: str = "") -> bytes:
    """`symbol(x)` = x + 1, or what `calls` gives for x, + 1."""
    t = Text()
    if calls:
        t.line(f"func.func private @{calls}(i64) -> i64")
    with t.function(symbol, [("x", "i64")], "i64"):
        x = t.call(calls, [("%x", "i64")], "i64") if calls else "%x"
        t.line(f"return {t.add(x, t.constant(1))} : i64")
    return compile_object([lower_kernel(str(t))], symbol, host_target())


def call(library: Library, symbol: str, x: int) -> int:
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(library.address(symbol))
    return int(function(x))


def test_objects_are_linked_with_each_other() -> None:
    library = Library([adder("bp_one"), adder("bp_two", calls="bp_one")], ["bp_two"])
    assert call(library, "bp_two", 40) == 42


def test_two_libraries_may_use_the_same_names() -> None:
    first = Library([adder("bp_same")], ["bp_same"])
    second = Library([adder("bp_base"), adder("bp_same", calls="bp_base")], ["bp_same"])
    assert (call(first, "bp_same", 0), call(second, "bp_same", 0)) == (1, 2)


def test_a_symbol_that_nobody_defines_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="bp_lonely"):
        Library([adder("bp_lonely", calls="bp_nowhere")], ["bp_lonely"])


def test_without_an_openmp_runtime_the_package_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "_openmp_candidates", lambda: ["libnothing_of_this_name.so"])
    with pytest.raises(UserError, match="intel-openmp"):
        load_openmp()
