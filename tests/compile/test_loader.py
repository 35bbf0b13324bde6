"""Loaded code finds LLVM's OpenMP runtime, whatever else the process has loaded."""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from buddy_pipeline.compile.codegen import compile_object
from buddy_pipeline.compile.kernels.driver import DRIVER, emit_driver
from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.lowering import lower_kernel
from buddy_pipeline.compile.manifest import StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import host_target

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
