"""The parallel regions of a stage, as its compiled code counts them.

A parallel region is what the threads of a team do together between two barriers: one kernel, or one
island over all tokens. Each stage has tables of its own, one a thread, so stages that run at the
same time in one process do not disturb each other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from buddy_pipeline.compile.profile_table import PROFILE_SLOT_WORDS, ProfileWord, SlotWord
from buddy_pipeline.ranks.memory_blocks import aligned_zeros

#: Steps of which single regions are kept for a trace, the latest.
TRACED_STEPS = 32
#: Rows of a thread's table before the first region: the head, and slot 0.
_ROWS_BEFORE = 2
_CALIBRATION_NS = 50_000_000
_TRIES = 8


@dataclass(frozen=True)
class Region:
    """One region of a step."""

    unit: str
    """"positions", "prelude", "postlude" or the layer's number."""
    partition: str
    template: str
    name: str


@dataclass(frozen=True)
class RegionTimes:
    """What one region took, summed over its calls, ns; on thread 0 unless it says otherwise."""

    region: Region
    calls: int
    wall: float
    """From its start to the end of its barrier."""
    gap_before: float
    gap_after: float
    waits: float
    """In the barrier, of all threads."""
    first_waits: float
    """In the barrier, of thread 0."""


@dataclass(frozen=True)
class TracedStep:
    """When the regions of one step began, arrived at their barrier and left it."""

    times: np.ndarray
    """float64 [threads, regions, 3], ns of `time.perf_counter_ns`"""


@dataclass(frozen=True)
class StageTimes:
    """What a stage's regions took together, ns, on thread 0 unless it says otherwise."""

    steps: int
    span: float
    """From the first region of a step to the end of its last, summed over the steps."""
    regions: tuple[RegionTimes, ...]
    """In the order of a step; the last one stands for all that had no slot, if there are any."""
    without_slot: int
    """Regions of a step that had no slot of their own."""
    traced: tuple[TracedStep, ...]

    @property
    def in_regions(self) -> float:
        return sum(each.wall for each in self.regions)

    @property
    def between_regions(self) -> float:
        return sum(each.gap_before for each in self.regions)

    @property
    def waits(self) -> float:
        """In barriers, of all threads."""
        return sum(each.waits for each in self.regions)

    @property
    def first_waits(self) -> float:
        """In barriers, of thread 0."""
        return sum(each.first_waits for each in self.regions)


class RegionProfile:
    """The tables that the compiled code of one stage writes, and their reading.

    regions: of one step, in order.
    slots: the most regions to count apart; the others are counted together.
    ticks: reads the counter that the compiled code uses.
    """

    def __init__(
        self, regions: Sequence[Region], threads: int, slots: int, ticks: Callable[[], int]
    ) -> None:
        self._regions = tuple(regions)
        self._named = min(slots, len(regions))
        rows = _ROWS_BEFORE + self._named + 1
        self._tables = aligned_zeros((threads, rows, PROFILE_SLOT_WORDS), np.int64)
        self._traced: deque[np.ndarray] = deque(maxlen=TRACED_STEPS)
        self._ticks = ticks
        self._start = _read_both(ticks)

    @property
    def address(self) -> int:
        """Address of thread 0's table."""
        return self._tables.ctypes.data

    @property
    def stride(self) -> int:
        """Bytes from one thread's table to the next."""
        return self._tables.strides[0]

    @property
    def other(self) -> int:
        """The slot of regions that have none of their own."""
        return self._named + 1

    def keep_step(self) -> None:
        """Keeps when the regions of the step that ended last ran, for the trace."""
        first, last = SlotWord.START.value, SlotWord.END.value
        named = slice(_ROWS_BEFORE, _ROWS_BEFORE + self._named)
        self._traced.append(self._tables[:, named, first : last + 1].copy())

    def read(self) -> StageTimes:
        """What was counted so far; call between steps."""
        start_ticks, start_ns = self._start
        # Ticks are scaled by how many went by since the start: wait until that is precise.
        while time.perf_counter_ns() - start_ns < _CALIBRATION_NS:
            time.sleep(_CALIBRATION_NS / 1e9 / 10)
        end_ticks, end_ns = _read_both(self._ticks)
        scale = (end_ns - start_ns) / (end_ticks - start_ticks)
        head = self._tables[0, 0]
        rows = []
        other = Region("", "", "", "other")
        for number, region in enumerate((*self._regions[: self._named], other)):
            slot = self._tables[:, _ROWS_BEFORE + number]
            first = slot[0]
            calls = int(first[SlotWord.CALLS.value])
            if region is other and not calls:
                continue
            work, wait = first[SlotWord.WORK.value], first[SlotWord.WAIT.value]
            rows.append(
                RegionTimes(
                    region=region,
                    calls=calls,
                    wall=float(work + wait) * scale,
                    gap_before=float(first[SlotWord.GAP_BEFORE.value]) * scale,
                    gap_after=float(first[SlotWord.GAP_AFTER.value]) * scale,
                    waits=float(slot[:, SlotWord.WAIT.value].sum()) * scale,
                    first_waits=float(wait) * scale,
                )
            )
        return StageTimes(
            steps=int(head[ProfileWord.STEPS.value]),
            span=float(head[ProfileWord.SPAN.value]) * scale,
            regions=tuple(rows),
            without_slot=len(self._regions) - self._named,
            traced=tuple(
                TracedStep((ticks - start_ticks) * scale + start_ns) for ticks in self._traced
            ),
        )


def _read_both(ticks: Callable[[], int]) -> tuple[float, float]:
    """The counter and `time.perf_counter_ns` at one moment: the closest pair of a few tries."""
    pairs = []
    for _ in range(_TRIES):
        before = time.perf_counter_ns()
        count = ticks()
        after = time.perf_counter_ns()
        pairs.append((after - before, count, (before + after) / 2))
    _, count, moment = min(pairs)
    return count, moment
