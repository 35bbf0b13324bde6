"""Rank 0's view of the whole pipeline: sequences go in, their tokens come out as they are sampled.

The engine keeps microbatches under way through all ranks; what is in them is the scheduler's
affair. It sends the next one before it samples from the last where it can, so that the other ranks
work meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from buddy_pipeline.ranks.memory import peak_memory
from buddy_pipeline.ranks.messages import Bounds, Kind, Step
from buddy_pipeline.ranks.scheduler import Microbatch, Scheduler, groups_for
from buddy_pipeline.ranks.sequence import Sequence
from buddy_pipeline.ranks.serve import StepRunner
from buddy_pipeline.ranks.transport import Loopback, Transport

_TIMES_KEPT = 0.9
"""Weight of the past in the running mean of stage times: about the last ten steps count."""


class LastStage(StepRunner, Protocol):
    """What the engine needs of the stage with the head."""

    @property
    def vocab_size(self) -> int:
        """Logits a row."""

    def logits(self, rows: int) -> np.ndarray:
        """float32 [rows, vocab], a view of what the last run wrote."""


@dataclass(frozen=True)
class Sampled:
    """A sequence's next token."""

    sequence: Sequence
    token: int
    logits: np.ndarray
    """float32 [vocab], what it was chosen from: a view, valid until the engine's next call."""


class Engine:
    """Runs sequences through all ranks.

    stage: rank 0's own stage, which has the head.
    ring: how messages get from rank 0 through the other ranks and back; a `Loopback` in a world
        of one.
    scheduler: decides what runs next.
    bounds: positions and slots of the KV cache, size of the vocabulary.
    adapt: choose the number of decoding groups from measured stage times.
    """

    def __init__(
        self,
        stage: LastStage,
        ring: Transport | Loopback,
        scheduler: Scheduler,
        bounds: Bounds,
        *,
        adapt: bool = True,
    ) -> None:
        self.vocab_size = stage.vocab_size
        self.context_length = bounds.context
        self.max_sequences = scheduler.limits.sequences
        self._stage = stage
        self._ring = ring
        self._scheduler = scheduler
        self._bounds = bounds
        self._adapt = adapt
        self._under_way: deque[Microbatch] = deque()
        self._sampled: list[Sampled] = []
        self._stages_ns = self._slowest_ns = 0.0  # running means of a step
        self._closed = False

    @property
    def waiting(self) -> int:
        """Sequences that have been submitted and wait for room."""
        return self._scheduler.waiting

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence in the queue; its tokens come from `advance`.

        Raises ValueError for a prompt that is empty, longer than the context, or has ids that are
        not in the vocabulary.
        """
        length, vocab = len(sequence.ids), self._bounds.vocab
        if not 1 <= length <= self._bounds.context:
            raise ValueError(
                f"a prompt of {length} tokens: expected 1 to {self._bounds.context}, the context"
            )
        low, high = min(sequence.ids), max(sequence.ids)
        if low < 0 or high >= vocab:
            raise ValueError(f"ids from {low} to {high}: the vocabulary has {vocab}")
        self._scheduler.add(sequence)

    def advance(self) -> list[Sampled]:
        """Run until sequences have new tokens, which are part of their ids then, and return these.

        A sequence goes on until `finish` is called for it, or its context is full: the last token
        it can have needs no place in the KV cache. Empty if there is nothing to run.
        """
        self._fill()
        while self._under_way and not self._sampled:
            self._finish_oldest()
            if not self._sampled:
                self._fill()
        sampled, self._sampled = self._sampled, []
        return sampled

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, also one that has not begun or is under way; twice is as once."""
        self._scheduler.finish(sequence)

    def peak_memory(self) -> list[int]:
        """Peak resident memory of each rank's process so far, bytes, by rank."""
        self._ring.send(self._ring.begin(Kind.PEAK_MEMORY))
        others = self._receive(Kind.PEAK_MEMORY).payload_words.tolist()  # rank world-1 first
        return [peak_memory(), *reversed(others)]

    def close(self) -> None:
        """Stop all other ranks; returns when each has received everything that was sent to it."""
        if self._closed:
            return
        self._closed = True
        self._ring.send(self._ring.begin(Kind.STOP))
        # Steps that an exception has left under way may still come before it.
        while self._ring.receive().kind is not Kind.STOP:
            pass
        self._ring.close()

    def _fill(self) -> None:
        """Send microbatches off while there are any to send."""
        while (microbatch := self._scheduler.next()) is not None:
            self._send(microbatch)
            self._under_way.append(microbatch)

    def _send(self, microbatch: Microbatch) -> None:
        positions: list[int] = []
        slots: list[int] = []
        ids: list[int] = []
        rows: list[int] = []
        for piece in microbatch.pieces:
            assert piece.sequence.slot is not None
            positions += range(piece.start, piece.stop)
            slots += [piece.sequence.slot] * (piece.stop - piece.start)
            ids += piece.sequence.ids[piece.start : piece.stop]
            if piece.is_last:
                rows.append(len(ids) - 1)
        step = self._ring.begin(Kind.STEP, len(ids), len(rows), len(microbatch.changes))
        step.positions[:] = positions
        step.slots[:] = slots
        step.ids[:] = ids
        step.rows[:] = rows
        if microbatch.changes:
            step.changes[:] = microbatch.changes
        self._ring.send(step)

    def _receive(self, kind: Kind) -> Step:
        """Receive a message of this kind; steps that come before it are run as usual."""
        while (step := self._ring.receive()).kind is not kind:
            self._run(step)
        return step

    def _finish_oldest(self) -> None:
        """Receive the oldest step under way, run rank 0's stage on it and sample."""
        self._run(self._receive(Kind.STEP))

    def _run(self, step: Step) -> None:
        begun = time.perf_counter_ns()
        self._stage.run(step, step.payload_address, 0)
        self._fill()
        microbatch = self._under_way.popleft()
        self._sample(microbatch, self._stage.logits(len(step.rows)))
        self._scheduler.done(microbatch)
        step.add_time(time.perf_counter_ns() - begun)
        self._measure(step.times)

    def _sample(self, microbatch: Microbatch, logits: np.ndarray) -> None:
        """Choose the next token of every sequence whose logits the microbatch has led to."""
        wanted = [piece.sequence for piece in microbatch.pieces if piece.is_last]
        for row, sequence in zip(logits, wanted, strict=True):
            if sequence.finished:
                continue
            token = sequence.choose(row, sequence.ids)
            sequence.ids.append(token)
            self._sampled.append(Sampled(sequence, token, row))
            if len(sequence.ids) > self._bounds.context:
                self._scheduler.finish(sequence)

    def _measure(self, times: tuple[int, int]) -> None:
        """Suit the number of groups to how evenly the stages share the work."""
        stages, slowest = times
        self._stages_ns += (stages - self._stages_ns) * (1 - _TIMES_KEPT)
        self._slowest_ns += (slowest - self._slowest_ns) * (1 - _TIMES_KEPT)
        if self._adapt:
            most = self._scheduler.limits.microbatches
            self._scheduler.decode_groups = groups_for(self._stages_ns, self._slowest_ns, most)
