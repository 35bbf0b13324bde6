"""Which cache positions a token sees, in all and within one span."""

from buddy_pipeline.compile.manifest import KV_SPAN
from buddy_pipeline.compile.mlir_text import Text


def first_position(t: Text, last: str, window: str) -> str:
    """The first position that a token at `last` sees: a window of w holds the token itself and
    w - 1 before it; 0 means no window."""
    zero = t.constant(0)
    edge = t.add(t.binary("arith.subi", last, window), t.constant(1))
    edge = t.binary("arith.maxsi", edge, zero)
    return t.select(t.compare("eq", window, zero), zero, edge, "i64")


def begin_in_span(t: Text, low: str, last: str, window: str) -> str:
    """The first place that it sees in the span which starts at position `low`."""
    first = first_position(t, last, window)
    return t.binary("arith.maxsi", t.binary("arith.subi", first, low), t.constant(0))


def end_in_span(t: Text, low: str, last: str) -> str:
    """One more than the last place that it sees there."""
    end = t.add(t.binary("arith.subi", last, low), t.constant(1))
    return t.binary("arith.minsi", end, t.constant(KV_SPAN))
