"""The driver: one call runs a stage's whole step with one team of threads.

It walks the stage's table of (function, arguments) pairs. Every thread makes every call and finds
its own share of the loops from its thread id; kernels meet at the barrier defined here.
"""

from buddy_pipeline.compile.kernels.step import BARRIER, step_word
from buddy_pipeline.compile.manifest import StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

DRIVER = "bp_run_stage"
#: Polls of the barrier before a waiting thread offers its core to others (about 20 µs).
SPINS = 4000


def emit_driver(target: Target) -> str:
    """MLIR text of the module with the driver and the barrier."""
    t = Text()
    t.line("llvm.func @sched_yield() -> i32")
    # Not omp_get_thread_num: where another OpenMP runtime is in the process (PyTorch's, say), that
    # name may be the other's, which takes every thread of ours for the first of its own.
    t.line("llvm.func @__kmpc_bound_thread_num(!llvm.ptr) -> i32")
    _emit_barrier(t, target)
    _emit_driver(t)
    return str(t)


def _emit_driver(t: Text) -> None:
    """`bp_run_stage(calls, count, step)`: `calls` holds `count` pairs of pointers."""
    args = [("calls", "!llvm.ptr"), ("count", "i64"), ("step", "!llvm.ptr")]
    with t.function(DRIVER, args):
        team = step_word(t, StepWord.TEAM)
        threads = t.op(f"arith.trunci {team} : i64 to i32")
        with t.block(f"omp.parallel num_threads({threads} : i32)"):
            place = t.op("llvm.mlir.zero : !llvm.ptr")
            number = t.op(f"llvm.call @__kmpc_bound_thread_num({place}) : (!llvm.ptr) -> i32")
            tid = t.op(f"arith.extsi {number} : i32 to i64")
            zero, one, two = t.constant(0), t.constant(1), t.constant(2)
            with t.loop(zero, "%count", one) as call:
                pair = t.gep("%calls", t.mul(call.index, two), "i64")
                function = t.word(pair, 0, "!llvm.ptr")
                table = t.word(pair, 1, "!llvm.ptr")
                t.line(
                    f"llvm.call {function}({table}, %step, {tid}) : "
                    "!llvm.ptr, (!llvm.ptr, !llvm.ptr, i64) -> ()"
                )
            t.line("omp.terminator")
        t.line("return")


def _emit_barrier(t: Text, target: Target) -> None:
    """A sense-counting barrier: the last to arrive resets the count and moves the generation on.

    Waiting threads poll the generation and, after a while, yield their core, so that a team on an
    oversubscribed host still makes progress.
    """
    pointer = "!llvm.ptr"
    with t.function(BARRIER, [("step", pointer)]):
        team = step_word(t, StepWord.TEAM)
        alone = t.compare("ule", team, t.constant(1))
        t.line(f"cf.cond_br {alone}, ^done, ^arrive")
        t.line("^arrive:")
        state = step_word(t, StepWord.BARRIER, pointer)
        one = t.constant(1)
        # The two counters lie on cache lines of their own.
        generation_at = t.gep(state, 8, "i64")
        generation = t.op(
            f"llvm.load {generation_at} atomic monotonic {{alignment = 8 : i64}} : {pointer} -> i64"
        )
        before = t.op(f"llvm.atomicrmw add {state}, {one} acq_rel : {pointer}, i64")
        last = t.compare("eq", t.add(before, one), team)
        t.line(f"cf.cond_br {last}, ^release, ^wait({one} : i64)")
        t.line("^release:")
        zero = t.constant(0)
        atomic = "{alignment = 8 : i64} : i64, !llvm.ptr"
        t.line(f"llvm.store {zero}, {state} atomic monotonic {atomic}")
        following = t.add(generation, one)
        t.line(f"llvm.store {following}, {generation_at} atomic release {atomic}")
        t.line("cf.br ^done")
        t.line("^wait(%polls: i64):")
        seen = t.op(
            f"llvm.load {generation_at} atomic acquire {{alignment = 8 : i64}} : {pointer} -> i64"
        )
        same = t.compare("eq", seen, generation)
        t.line(f"cf.cond_br {same}, ^pause, ^done")
        t.line("^pause:")
        _emit_pause(t, target)
        more = t.add("%polls", one)
        patient = t.compare("ult", more, t.constant(SPINS))
        t.line(f"cf.cond_br {patient}, ^wait({more} : i64), ^yield")
        t.line("^yield:")
        t.op("llvm.call @sched_yield() : () -> i32")
        t.line(f"cf.br ^wait({more} : i64)")
        t.line("^done:")
        t.line("return")


def _emit_pause(t: Text, target: Target) -> None:
    """The CPU's hint that this is a spin loop."""
    if target.triple.startswith("x86_64"):
        t.line('llvm.call_intrinsic "llvm.x86.sse2.pause"() : () -> ()')
    elif target.triple.startswith("aarch64"):
        yield_hint = t.constant(1, "i32")
        t.line(f'llvm.call_intrinsic "llvm.aarch64.hint"({yield_hint}) : (i32) -> ()')
