"""Given tokens through a whole model in this process, for measuring and scoring: nothing is
scheduled or sampled, and what a caller asks for runs at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from buddy_pipeline.compile.manifest import KV_BLOCK
from buddy_pipeline.ranks.engine import LastStage
from buddy_pipeline.ranks.messages import Bounds, Kind, SlotChange, StepBuffer
from buddy_pipeline.ranks.scheduler import chunk_size


class Playback:
    """Runs tokens of sequences in slots of the caller's choice.

    stage: the whole model.
    bounds: positions and slots of the KV cache, size of the vocabulary.
    tokens, rows: tokens and logits that a step may carry.
    """

    def __init__(self, stage: LastStage, bounds: Bounds, *, tokens: int, rows: int) -> None:
        self._stage = stage
        self._bounds = bounds
        self._buffer = StepBuffer(tokens, rows, bytes_per_token=0, max_changes=1)
        self._capacity = -(-bounds.context // KV_BLOCK) * KV_BLOCK
        self._has_memory: set[int] = set()

    def prefill(self, slot: int, ids: np.ndarray, start: int = 0) -> np.ndarray:
        """Run the tokens `ids`, int64 [n], of one sequence from position `start` on.

        Returns the logits after the last of them, float32 [vocab], a view that is valid until the
        next call. Raises ValueError for ids, a slot or positions out of range.
        """
        self._check(slot, ids, start)
        size = chunk_size(len(ids), stages=1, longest=self._buffer.max_tokens)
        for begin in range(0, len(ids), size):
            end = min(begin + size, len(ids))
            self._run(slot, ids[begin:end], start + begin, rows=int(end == len(ids)))
        return self._stage.logits(1)[0]

    def decode(self, slot: int, token: int, position: int) -> np.ndarray:
        """Run one token of a sequence; returns its logits as `prefill` does, same errors."""
        return self.prefill(slot, np.array([token], dtype=np.int64), position)

    def score(self, slot: int, ids: np.ndarray, start: int = 0) -> Iterator[np.ndarray]:
        """Run `ids` as `prefill` does; yields the logits after every one of them, in order.

        Each item is float32 [tokens, vocab] for the next few tokens, a view that is valid until the
        next item. Errors as in `prefill`, with the first item.
        """
        self._check(slot, ids, start)
        size = min(self._buffer.max_tokens, self._buffer.max_rows)
        for begin in range(0, len(ids), size):
            part = ids[begin : begin + size]
            self._run(slot, part, start + begin, rows=len(part))
            yield self._stage.logits(len(part))

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

    def _run(self, slot: int, ids: np.ndarray, position: int, rows: int) -> None:
        """Run one step; the logits of its last `rows` tokens are wanted."""
        changes = [] if slot in self._has_memory else [SlotChange(slot, self._capacity, slot, 0)]
        self._has_memory.add(slot)
        step = self._buffer.begin(Kind.STEP, 0, len(ids), rows, changes=len(changes))
        step.positions[:] = np.arange(position, position + len(ids))
        step.slots[:] = slot
        step.ids[:] = ids
        step.rows[:] = np.arange(len(ids) - rows, len(ids))
        if changes:
            step.changes[:] = changes
        self._stage.run(step, step.payload_address, 0)
