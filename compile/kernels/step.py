"""The layout of a step record: what the compiled code of a stage reads once a step.

A record of 8-byte words that `ranks.stage` fills and every kernel gets a pointer to.
"""

from buddy_pipeline.compile.manifest import StepWord
from buddy_pipeline.compile.mlir_text import Text

BARRIER = "bp_barrier"
END_REGION = "bp_end_region"


def step_word(t: Text, word: StepWord, kind: str = "i64") -> str:
    """Loads one word of the record %step."""
    return t.word("%step", word.value, kind)


def declare_barrier(t: Text) -> None:
    """Declares the team barrier, which the driver object defines."""
    t.line(f"func.func private @{BARRIER}(!llvm.ptr)")


def barrier(t: Text) -> None:
    """All threads of the team wait for each other."""
    t.call(BARRIER, [("%step", "!llvm.ptr")])


def declare_end_region(t: Text) -> None:
    """Declares the end of a parallel region, which the driver object defines."""
    t.line(f"func.func private @{END_REGION}(!llvm.ptr, i64)")


def end_region(t: Text) -> None:
    """All threads wait for each other, and the profile, if there is one, counts the region."""
    t.call(END_REGION, [("%step", "!llvm.ptr"), ("%tid", "i64")])


def thread_share(t: Text, total: str, tid: str, team: str) -> tuple[str, str]:
    """First and last-but-one index of this thread's even share of `total`."""
    one = t.constant(1)
    low = t.binary("arith.divui", t.mul(tid, total), team)
    high = t.binary("arith.divui", t.mul(t.add(tid, one), total), team)
    return low, high
