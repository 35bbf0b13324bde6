"""Ends the job when a rank's own stage takes too long for a step, with a message that names it."""

from __future__ import annotations

import threading
import time

import numpy as np

from buddy_pipeline.ranks.engine import LastStage
from buddy_pipeline.ranks.faults import end_now
from buddy_pipeline.ranks.messages import Step
from buddy_pipeline.ranks.roll_call import was_stopped
from buddy_pipeline.ranks.world import World

_LOOKS = 4
"""Times that the watchdog looks during the time a step has."""
_LONGEST_SLEEP_S = 1.0


class WatchedStage:
    """A stage whose steps must end within `seconds`.

    A thread looks at the clock: the compiled code of a step cannot be interrupted, but it lets
    other threads run.
    """

    def __init__(self, stage: LastStage, world: World, seconds: float) -> None:
        self._stage = stage
        self._world = world
        self._seconds = seconds
        self._begun: tuple[int, float] | None = None  # number of the step, time
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @property
    def is_empty(self) -> bool:
        return self._stage.is_empty

    @property
    def vocab_size(self) -> int:
        return self._stage.vocab_size

    def logits(self, rows: int) -> np.ndarray:
        return self._stage.logits(rows)

    def run(self, step: Step, inputs: int, outputs: int) -> None:
        self._begun = (step.sequence, time.monotonic())
        self._stage.run(step, inputs, outputs)
        self._begun = None

    def _watch(self) -> None:
        pause = min(self._seconds / _LOOKS, _LONGEST_SLEEP_S)
        looked = running_since = time.monotonic()
        while True:
            time.sleep(pause)
            before, looked = looked, time.monotonic()
            if was_stopped(before, looked):  # and with it the step
                running_since = looked
            begun = self._begun
            if begun is not None and looked - max(begun[1], running_since) > self._seconds:
                end_now(
                    self._world,
                    f"step {begun[0]} has not ended within {self._seconds:g} s (--step-timeout)",
                )
