"""Rank 0's view of the whole pipeline: token ids go in, logits come out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from buddy_pipeline.ranks.memory import peak_memory
from buddy_pipeline.ranks.messages import Bounds, Kind
from buddy_pipeline.ranks.serve import StepRunner
from buddy_pipeline.ranks.transport import Loopback, Transport

_STREAM_TOKENS = 13
"""Tokens whose arithmetic takes as long as reading the f32 weights once: 265 GFLOP/s over 2 FLOP a
weight and token, against 41 GB/s over 4 bytes a weight, as measured on one Zen 5 core."""


class LastStage(StepRunner, Protocol):
    """What the engine needs of the stage with the head."""

    @property
    def max_tokens(self) -> int:
        """The most tokens a step may carry."""

    @property
    def max_rows(self) -> int:
        """The most tokens of a step whose logits may be asked for."""

    @property
    def vocab_size(self) -> int:
        """Logits a row."""

    def logits(self, rows: int) -> np.ndarray:
        """float32 [rows, vocab], a view of what the last run wrote."""


class Engine:
    """Runs steps through all ranks.

    stage: rank 0's own stage, which has the head.
    ring: how messages get from rank 0 through the other ranks and back; a `Loopback` in a world
        of one.
    bounds: positions and slots of the KV cache, size of the vocabulary.
    """

    def __init__(self, stage: LastStage, ring: Transport | Loopback, bounds: Bounds) -> None:
        self.vocab_size = stage.vocab_size
        self.context_length = bounds.context
        self.chunk = stage.max_tokens
        self._stage = stage
        self._ring = ring
        self._bounds = bounds
        self._closed = False

    def prefill(self, slot: int, ids: np.ndarray, start: int = 0) -> np.ndarray:
        """Run the tokens `ids`, int64 [n], of one sequence from position `start` on.

        Returns the logits after the last of them, float32 [vocab], a view that is valid until the
        next call. The ids are cut into chunks that follow each other through the ranks, so that
        all of these work at once. Raises ValueError for ids, a slot or positions out of range.
        """
        self._check(slot, ids, start)
        size = chunk_size(len(ids), self._ring.world, self.chunk)
        under_way = 0
        for begin in range(0, len(ids), size):
            if under_way == self._ring.in_flight:
                self._finish_oldest()
                under_way -= 1
            end = min(begin + size, len(ids))
            self._start(slot, ids[begin:end], start + begin, rows=int(end == len(ids)))
            under_way += 1
        for _ in range(under_way):
            self._finish_oldest()
        return self._stage.logits(1)[0]

    def decode(self, slot: int, token: int, position: int) -> np.ndarray:
        """Run one token of a sequence; returns its logits as `prefill` does, same errors."""
        return self.prefill(slot, np.array([token], dtype=np.int64), position)

    def score(self, slot: int, ids: np.ndarray, start: int = 0) -> Iterator[np.ndarray]:
        """Run `ids` as `prefill` does; yields the logits after every one of them, in order.

        Each item is float32 [tokens, vocab] for the next few tokens, a view that is valid until the
        next item. Steps run one after the other. Errors as in `prefill`, with the first item.
        """
        self._check(slot, ids, start)
        size = min(self.chunk, self._stage.max_rows)
        for begin in range(0, len(ids), size):
            part = ids[begin : begin + size]
            self._start(slot, part, start + begin, rows=len(part))
            self._finish_oldest()
            yield self._stage.logits(len(part))

    def peak_memory(self) -> list[int]:
        """Peak resident memory of each rank's process so far, bytes, by rank."""
        self._ring.send(self._ring.begin(Kind.PEAK_MEMORY))
        others = self._ring.receive().payload_words.tolist()  # rank world-1 first
        return [peak_memory(), *reversed(others)]

    def close(self) -> None:
        """Stop all other ranks; returns when each has received everything that was sent to it."""
        if self._closed:
            return
        self._closed = True
        self._ring.send(self._ring.begin(Kind.STOP))
        # Steps of a prefill that an exception has interrupted may still come before it.
        while self._ring.receive().kind is not Kind.STOP:
            pass
        self._ring.close()

    def _check(self, slot: int, ids: np.ndarray, start: int) -> None:
        if ids.ndim != 1 or len(ids) == 0:
            raise ValueError(f"ids of shape {ids.shape}: needs one dimension and at least one id")
        if not 0 <= slot < self._bounds.slots:
            raise ValueError(f"slot {slot}: there are {self._bounds.slots}")
        if start < 0 or start + len(ids) > self._bounds.context:
            raise ValueError(
                f"{len(ids)} tokens from position {start}: "
                f"the context has {self._bounds.context} positions"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._bounds.vocab:
            raise ValueError(f"ids from {low} to {high}: the vocabulary has {self._bounds.vocab}")

    def _start(self, slot: int, ids: np.ndarray, position: int, rows: int) -> None:
        """Send one step off; the logits of its last `rows` tokens are wanted."""
        step = self._ring.begin(Kind.STEP, len(ids), rows)
        step.positions[:] = np.arange(position, position + len(ids))
        step.slots[:] = slot
        step.ids[:] = ids
        step.rows[:] = np.arange(len(ids) - rows, len(ids))
        self._ring.send(step)

    def _finish_oldest(self) -> None:
        """Receive the oldest step under way and run rank 0's stage on it."""
        step = self._ring.receive()
        self._stage.run(step, step.payload_address, 0)


def chunk_size(tokens: int, world: int, longest: int) -> int:
    """Tokens a chunk of a prompt of `tokens`: at most `longest`, and all chunks about equal.

    A prompt in m chunks takes m + world - 1 rounds, of which each costs one reading of a rank's
    weights and the arithmetic of tokens / m tokens. That is least for chunks of
    sqrt(tokens * _STREAM_TOKENS / (world - 1)); a world of one takes the longest chunks there are.
    """
    wanted = longest
    if world > 1:
        best = math.sqrt(tokens * _STREAM_TOKENS / (world - 1))
        wanted = min(longest, max(1, round(best)))
    chunks = -(-tokens // wanted)
    return -(-tokens // chunks)
