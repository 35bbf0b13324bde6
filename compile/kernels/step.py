"""The layout of a step record: what the compiled code of a stage reads once a step.

A record of 8-byte words that `ranks.stage` fills and every kernel gets a pointer to.
"""

from buddy_pipeline.compile.manifest import StepWord
from buddy_pipeline.compile.mlir_text import Text

BARRIER = "bp_barrier"


def step_word(t: Text, word: StepWord, kind: str = "i64") -> str:
    """Loads one word of the record %step."""
    return t.word("%step", word.value, kind)


def declare_barrier(t: Text) -> None:
    """Declares the team barrier, which the driver object defines."""
    t.line(f"func.func private @{BARRIER}(!llvm.ptr)")


def barrier(t: Text) -> None:
    """All threads of the team wait for each other."""
    t.call(BARRIER, [("%step", "!llvm.ptr")])


def thread_share(t: Text, total: str, tid: str, team: str) -> tuple[str, str]:
    """First and last-but-one index of this thread's even share of `total`."""
    one = t.constant(1)
    low = t.binary("arith.divui", t.mul(tid, total), team)
    high = t.binary("arith.divui", t.mul(t.add(tid, one), total), team)
    return low, high
