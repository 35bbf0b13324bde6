"""The driver: a table of calls, run by teams of every size that meet at the barrier."""

import ctypes

import numpy as np
import pytest

from buddy_pipeline.compile.kernels.driver import DRIVER, emit_driver
from buddy_pipeline.compile.kernels.step import barrier, declare_barrier, step_word
from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.manifest import StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.ranks.memory_blocks import aligned_zeros
from tests.compile.harness import kernel_object

ROUNDS = 50


def emit_relay() -> str:
    """`relay(args, step, tid)`: args[0] is a table [2][team]; in each of `ROUNDS` rounds a thread
    adds the sum of all cells of one half to its own cell of the other, so that any thread that
    runs ahead of another leaves wrong sums."""
    t = Text()
    declare_barrier(t)
    args = [("args", "!llvm.ptr"), ("step", "!llvm.ptr"), ("tid", "i64")]
    with t.function("relay", args):
        team = step_word(t, StepWord.TEAM)
        table = t.word("%args", 0, "!llvm.ptr")
        zero, one = t.constant(0), t.constant(1)
        with t.loop(zero, t.constant(ROUNDS), one) as turn:
            half = t.op(f"arith.remui {turn.index}, {t.constant(2)} : i64")
            other = t.binary("arith.subi", one, half)
            source = t.gep(table, t.mul(half, team), "i64")
            to = t.gep(t.gep(table, t.mul(other, team), "i64"), "%tid", "i64")
            with t.loop(zero, team, one, [(zero, "i64")]) as cell:
                value = t.load(t.gep(source, cell.index, "i64"), "i64", 8)
                cell.next = [t.add(cell.carried[0], value)]
            t.store(t.add(cell.results[0], "%tid"), to, "i64", 8)
            barrier(t)
        t.line("return")
    return str(t)


def relayed(table: np.ndarray) -> np.ndarray:
    """What one call of `relay` makes of a table; sums wrap round as they do in 64 bits."""
    table = table.copy()
    for turn in range(ROUNDS):
        half = turn % 2
        table[1 - half] = table[half].sum() + np.arange(table.shape[1], dtype=np.uint64)
    return table


@pytest.fixture(scope="module")
def library() -> Library:
    target = host_target()
    objects = [
        kernel_object(emit_driver(target), DRIVER, target),
        kernel_object(emit_relay(), "relay", target),
    ]
    return Library(objects, [DRIVER, "relay"])


def drive(library: Library, team: int, calls: list[int], args: np.ndarray) -> None:
    state = aligned_zeros((16,), np.int64)
    record = np.zeros(len(StepWord), np.int64)
    record[StepWord.TEAM.value] = team
    record[StepWord.BARRIER.value] = state.ctypes.data
    table = np.array([(address, args.ctypes.data) for address in calls], np.int64).reshape(-1, 2)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    kind(library.address(DRIVER))(table.ctypes.data, len(calls), record.ctypes.data)
    assert state[0] == 0  # the barrier is ready for the next step


@pytest.mark.parametrize("team", [1, 2, 3, 5])
def test_every_thread_makes_every_call_and_waits_for_the_others(
    library: Library, team: int
) -> None:
    """More threads than cores, too: whoever waits lets the others run."""
    for _ in range(3):
        table = np.ones((2, team), np.uint64)
        args = np.array([table.ctypes.data], np.int64)
        drive(library, team, [library.address("relay")], args)
        assert (table == relayed(np.ones((2, team), np.uint64))).all()


def test_calls_run_in_order_and_an_empty_table_does_nothing(library: Library) -> None:
    table = np.ones((2, 2), np.uint64)
    args = np.array([table.ctypes.data], np.int64)
    drive(library, 2, [], args)
    assert (table == 1).all()
    drive(library, 2, [library.address("relay")] * 2, args)
    assert (table == relayed(relayed(np.ones((2, 2), np.uint64)))).all()
