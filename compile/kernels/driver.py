"""The driver: one call runs a stage's whole step with one team of threads.

It walks the stage's table of (function, arguments) pairs. Every thread makes every call and finds
its own share of the loops from its thread id; kernels meet at the barrier defined here.

A parallel region is what the team does between two of a template's barriers. With a profile in the
step record each thread keeps a table of its own (`profile_table`) in which it counts regions in
the order of the step; without one, a branch at the end of a region and one a partition are all.
"""

from buddy_pipeline.compile.kernels.step import BARRIER, END_REGION, step_word
from buddy_pipeline.compile.manifest import StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.profile_table import PROFILE_SLOT_WORDS, ProfileWord, SlotWord
from buddy_pipeline.compile.target import Target

DRIVER = "bp_run_stage"
#: `bp_ticks() -> i64`: the counter that profiles are kept in.
TICKS = "bp_ticks"
#: Polls of the barrier before a waiting thread offers its core to others (about 20 µs).
SPINS = 4000


def emit_driver(target: Target) -> str:
    """MLIR text of the module with the driver and the barrier."""
    t = Text()
    t.line("llvm.func @sched_yield() -> i32")
    t.line("llvm.func @omp_get_thread_num() -> i32")
    _emit_ticks(t, target)
    _emit_barrier(t, target)
    _emit_end_region(t)
    _emit_driver(t)
    return str(t)


def _emit_driver(t: Text) -> None:
    """`bp_run_stage(calls, count, step)`: `calls` holds `count` pairs of pointers."""
    args = [("calls", "!llvm.ptr"), ("count", "i64"), ("step", "!llvm.ptr")]
    with t.function(DRIVER, args):
        team = step_word(t, StepWord.TEAM)
        threads = t.op(f"arith.trunci {team} : i64 to i32")
        with t.block(f"omp.parallel num_threads({threads} : i32)"):
            number = t.op("llvm.call @omp_get_thread_num() : () -> i32")
            tid = t.op(f"arith.extsi {number} : i32 to i64")
            zero, one, two = t.constant(0), t.constant(1), t.constant(2)
            profile, watched = _profile(t, tid)
            with t.when(watched):
                now = t.call(TICKS, [], "i64")
                for word in (ProfileWord.BEGIN, ProfileWord.END):
                    _set(t, profile, word, now)
                _set(t, profile, ProfileWord.CURSOR, one)
            with t.loop(zero, "%count", one) as call:
                pair = t.gep("%calls", t.mul(call.index, two), "i64")
                function = t.word(pair, 0, "!llvm.ptr")
                table = t.word(pair, 1, "!llvm.ptr")
                with t.when(watched):
                    _set(t, profile, ProfileWord.START, t.call(TICKS, [], "i64"))
                t.line(
                    f"llvm.call {function}({table}, %step, {tid}) : "
                    "!llvm.ptr, (!llvm.ptr, !llvm.ptr, i64) -> ()"
                )
            with t.when(watched):
                begin = t.word(profile, ProfileWord.BEGIN.value)
                end = t.word(profile, ProfileWord.END.value)
                _increase(t, profile, ProfileWord.SPAN, _difference(t, end, begin))
                _increase(t, profile, ProfileWord.STEPS, one)
            t.line("omp.terminator")
        t.line("return")


def _emit_end_region(t: Text) -> None:
    """`bp_end_region(step, tid)`: the barrier, with the region before it counted if watched.

    Its own work falls into the gap: the next region starts when it is done.
    """
    pointer = "!llvm.ptr"
    with t.function(END_REGION, [("step", pointer), ("tid", "i64")]):
        profile, watched = _profile(t, "%tid")
        t.line(f"cf.cond_br {watched}, ^timed, ^plain")
        t.line("^plain:")
        t.call(BARRIER, [("%step", pointer)])
        t.line("return")
        t.line("^timed:")
        arrival = t.call(TICKS, [], "i64")
        t.call(BARRIER, [("%step", pointer)])
        end = t.call(TICKS, [], "i64")
        one = t.constant(1)
        cursor = t.word(profile, ProfileWord.CURSOR.value)
        other = step_word(t, StepWord.PROFILE_OTHER)
        slot = _slot(t, profile, t.binary("arith.minui", cursor, other))
        before = t.binary("arith.subi", cursor, one)
        slot_before = _slot(t, profile, t.binary("arith.minui", before, other))
        start = t.word(profile, ProfileWord.START.value)
        gap = _difference(t, start, t.word(profile, ProfileWord.END.value))
        _increase(t, slot, SlotWord.CALLS, one)
        _increase(t, slot, SlotWord.WORK, _difference(t, arrival, start))
        _increase(t, slot, SlotWord.WAIT, _difference(t, end, arrival))
        _increase(t, slot, SlotWord.GAP_BEFORE, gap)
        _increase(t, slot_before, SlotWord.GAP_AFTER, gap)
        _set(t, slot, SlotWord.START, start)
        _set(t, slot, SlotWord.ARRIVAL, arrival)
        _set(t, slot, SlotWord.END, end)
        _set(t, profile, ProfileWord.END, end)
        _set(t, profile, ProfileWord.CURSOR, t.add(cursor, one))
        _set(t, profile, ProfileWord.START, t.call(TICKS, [], "i64"))
        t.line("return")


def _profile(t: Text, tid: str) -> tuple[str, str]:
    """This thread's profile table, and whether there is one."""
    tables = step_word(t, StepWord.PROFILE, "!llvm.ptr")
    null = t.op("llvm.mlir.zero : !llvm.ptr")
    watched = t.op(f'llvm.icmp "ne" {tables}, {null} : !llvm.ptr')
    return t.gep(tables, t.mul(tid, step_word(t, StepWord.PROFILE_STRIDE)), "i8"), watched


def _slot(t: Text, profile: str, index: str) -> str:
    """Address of a slot; the head of the table takes the room of one."""
    words = t.mul(t.add(index, t.constant(1)), t.constant(PROFILE_SLOT_WORDS))
    return t.gep(profile, words, "i64")


def _difference(t: Text, later: str, earlier: str) -> str:
    return t.binary("arith.subi", later, earlier)


def _set(t: Text, base: str, word: ProfileWord | SlotWord, value: str) -> None:
    t.store(value, t.gep(base, word.value, "i64"), "i64", 8)


def _increase(t: Text, base: str, word: ProfileWord | SlotWord, by: str) -> None:
    _set(t, base, word, t.add(t.word(base, word.value), by))


def _emit_ticks(t: Text, target: Target) -> None:
    """`bp_ticks() -> i64`: a counter that runs evenly, whatever the core and its frequency, and is
    read in a few nanoseconds: x86's time stamp, elsewhere the architecture's timer."""
    x86 = target.triple.startswith("x86_64")
    counter = "llvm.readcyclecounter" if x86 else "llvm.readsteadycounter"
    with t.function(TICKS, [], "i64"):
        ticks = t.op(f'llvm.call_intrinsic "{counter}"() : () -> i64')
        t.line(f"return {ticks} : i64")


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
