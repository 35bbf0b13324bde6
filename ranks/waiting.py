"""Waiting for MPI without keeping the cores from the ranks that work.

A rank blocked in MPI_Recv spins. With 4 ranks on 2 cores that took the working rank from 5.4 to
9.5 ms a step; polling with the back-off below gives the 5.4 back. For messages that come again and
again there is `arrivals`.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

_FIRST_PAUSE_S = 10e-6
_PAUSE_GROWTH = 1.5
_YIELDS = 8
_PR_SET_TIMERSLACK = 29  # prctl(2)
_TIMER_SLACK_NS = 1000
_IDLE_SHARE = 1e-3
_LONGEST_IDLE_PAUSE_S = 2e-3


def idle_pause(waited: float) -> float:
    """The pause, in seconds, that is next to nothing of what has been waited: whoever idles for
    seconds need not poll like one whose message is due."""
    return min(waited * _IDLE_SHARE, _LONGEST_IDLE_PAUSE_S)


@dataclass(frozen=True)
class Patience:
    """How to wait: spin for `spin_s`, yield a few times, then sleep up to `longest_pause_s`, or
    longer after seconds."""

    spin_s: float
    longest_pause_s: float

    def until(self, done: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Return True as soon as `done()` is true, which is called again and again; False when it
        is not after `seconds`."""
        if done():
            return True
        begun = time.perf_counter()
        while time.perf_counter() - begun < self.spin_s:
            if done():
                return True
        for _ in range(_YIELDS):
            os.sched_yield()
            if done():
                return True
        pause = min(_FIRST_PAUSE_S, self.longest_pause_s)
        while not done():
            waited = time.perf_counter() - begun
            if waited >= seconds:
                return False
            time.sleep(pause)
            pause = min(pause * _PAUSE_GROWTH, max(self.longest_pause_s, idle_pause(waited)))
        return True


EXCLUSIVE = Patience(spin_s=50e-6, longest_pause_s=50e-6)
"""For a rank with cores of its own: its polling takes time from nobody."""

SHARED = Patience(spin_s=2e-6, longest_pause_s=200e-6)
"""For a rank that shares its cores with others: each poll takes time from the one that works."""

IDLE = Patience(spin_s=0.0, longest_pause_s=5e-3)
"""For waits of seconds, while other ranks still compile and load."""


def sharpen_sleep() -> None:
    """Let sleeps of this process end within about 1 µs of their time instead of Linux's 50 µs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NS), 0, 0, 0)
