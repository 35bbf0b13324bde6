"""What a rank's own thread does from step to step: wait for messages, run, send, sample.

The loops that do these things know nothing of it: `Spans.watch` puts a clock around a method of an
object, so that without a profile nothing is in the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from time import perf_counter_ns
from typing import Any, NamedTuple

#: Spans that are kept one by one, the latest; sums are kept of all.
KEPT_SPANS = 1 << 17


class Kind(IntEnum):
    """What a rank does in a span of time; the rest of its time is Python's."""

    RECEIVE = 0
    """Waits for a message to arrive."""
    RUN = 1
    """Runs its block."""
    SEND = 2
    """Prepares a message, if need be waits for a free buffer, and hands it over."""
    SAMPLE = 3
    """Chooses a token."""


class Span(NamedTuple):
    """One span, ns of this process's `time.perf_counter_ns`."""

    kind: Kind
    begin: int
    end: int


class Spans:
    """The spans of one rank, recorded as they end."""

    def __init__(self) -> None:
        self.totals = [0] * len(Kind)
        """ns by kind"""
        self.counts = [0] * len(Kind)
        self.begin = self.end = perf_counter_ns()
        """The time that all spans lie in."""
        self.kept: deque[Span] = deque(maxlen=KEPT_SPANS)

    def watch(
        self, thing: Any, method: str, kind: Kind, after: Callable[[], None] | None = None
    ) -> None:
        """Has every call of a method of `thing` recorded; `after` is called behind each."""
        setattr(thing, method, self.timed(kind, getattr(thing, method), after))

    def timed(
        self,
        kind: Kind,
        function: Callable[..., Any],
        after: Callable[[], None] | None = None,
    ) -> Callable[..., Any]:
        """The function with every call recorded."""

        def recorded(*args: Any, **named: Any) -> Any:
            begin = perf_counter_ns()
            result = function(*args, **named)
            self._add(kind, begin, perf_counter_ns())
            if after is not None:
                after()
            return result

        return recorded

    def _add(self, kind: Kind, begin: int, end: int) -> None:
        self.totals[kind] += end - begin
        self.counts[kind] += 1
        self.end = end
        self.kept.append(Span(kind, begin, end))
