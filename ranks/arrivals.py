"""Waiting for messages that come again and again, on cores that other ranks use.

A poll takes time from the rank that works, and on a virtual CPU a timer is dear; but a message that
is looked for too seldom is seen too late. In decoding the next one comes after about the same time
as those before: so a rank sleeps until shortly before the first of these came, then polls finely
until after the last.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from buddy_pipeline.ranks.waiting import idle_pause

_REMEMBERED = 8
"""Waits by which the next one is judged: few, so that another kind of step is soon learned."""
_MARGIN_S = 100e-6
_MARGIN_SHARE = 1 / 16
"""Before the first and after the last arrival that is expected, together with the above."""
_FINE_PAUSE_S = 50e-6
_COARSE_PAUSE_S = 200e-6
_FINE_POLLS = 32
"""At most about so many in the time in which a message is expected."""
_EARLY_SHARE = 1 / 4
_LONGEST_EARLY_PAUSE_S = 2e-3
"""A message that comes earlier than any before is seen late by a quarter of its wait at most, or by
a coarse pause, and by no more than this."""


class Arrivals:
    """How long the latest messages were waited for, and waiting for the next."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque([0.0], maxlen=_REMEMBERED)

    def until(self, done: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Return True as soon as `done()` is true, which is called again and again; False when it
        is not after `seconds`, which is not remembered."""
        begun = time.perf_counter()
        expected = _Expected.after(self._waits)
        while not done():
            waited = time.perf_counter() - begun
            if waited >= seconds:
                return False
            time.sleep(expected.pause(waited))
        self._waits.append(time.perf_counter() - begun)
        return True


class _Expected(NamedTuple):
    """When a message may come, in seconds of waiting."""

    begin: float
    end: float

    @classmethod
    def after(cls, waits: deque[float]) -> _Expected:
        first, last = min(waits), max(waits)
        return cls(
            first - first * _MARGIN_SHARE - _MARGIN_S, last + last * _MARGIN_SHARE + _MARGIN_S
        )

    def pause(self, waited: float) -> float:
        """How long to sleep now, in seconds."""
        if waited < self.begin:
            early = max(_COARSE_PAUSE_S, min(waited * _EARLY_SHARE, _LONGEST_EARLY_PAUSE_S))
            return min(early, max(_FINE_PAUSE_S, self.begin - waited))
        if waited < self.end:
            fine = (self.end - self.begin) / _FINE_POLLS
            return min(max(_FINE_PAUSE_S, fine), _COARSE_PAUSE_S)
        return max(_COARSE_PAUSE_S, idle_pause(waited))
