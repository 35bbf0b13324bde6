"""The policy of rank 0: which tokens of which sequences make up the next microbatch.

First come, first served. Sequences that decode share the microbatches evenly, in the order in which
they became ready; what room a microbatch has left goes to prompts, in the order of arrival. Waiting
sequences are admitted one by one when their prompt is next, and never overtake each other. A
running sequence that outgrows the KV cache takes the memory of the youngest, which waits in front
of all others and then starts again: the oldest always gets on, so nobody starves.

Nothing here computes or communicates: `tests/ranks/test_scheduler.py` runs it on simulated stages.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from buddy_pipeline.ranks.messages import SlotChange
from buddy_pipeline.ranks.sequence import Sequence
from buddy_pipeline.ranks.slots import Slots

_STREAM_TOKENS = 13
"""Tokens whose arithmetic takes as long as reading the f32 weights once: 265 GFLOP/s over 2 FLOP a
weight and token, against 41 GB/s over 4 bytes a weight, as measured on one Zen 5 core."""
_BESIDE_DECODING = 64
"""Most prompt tokens in a microbatch while sequences decode: some times _STREAM_TOKENS, so that
prompts run near full speed and decoding steps take a few times as long as without."""
_NEGLIGIBLE_GAP = 0.1
"""Share of the slowest stage's time that is not worth another microbatch."""


@dataclass(frozen=True)
class Limits:
    """What a microbatch may hold and how many may be under way."""

    stages: int
    """Ranks."""
    tokens: int
    """In one microbatch; at least `sequences`."""
    sequences: int
    """That run at once."""
    microbatches: int
    """Under way at once."""
    decode_groups: int
    """Of these, how many have sequences that decode, to begin with."""
    prefill_chunk: int | None = None
    """Prompt tokens in one microbatch; None suits them to the stages and to who else runs."""


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence in a microbatch: its ids from `start` up to `stop`."""

    sequence: Sequence
    start: int
    stop: int
    is_last: bool
    """Nothing of the sequence is left to send: the logits after these tokens are wanted."""


@dataclass(frozen=True)
class Microbatch:
    """What goes through the ranks as one step."""

    pieces: list[Piece]
    changes: list[SlotChange]
    """To the KV cache, before the pieces run."""
    decodes: bool
    """Some sequences go on from a token that was generated."""


class Scheduler:
    """Queues of sequences, and the rule by which they move."""

    def __init__(self, limits: Limits, slots: Slots) -> None:
        self.limits = limits
        self.decode_groups = limits.decode_groups
        """Microbatches that decoding sequences are dealt out to; see `groups_for`."""
        self._slots = slots
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}  # an ordered set: by time of admission
        self._prompts: deque[Sequence] = deque()
        self._ready: deque[Sequence] = deque()
        self._under_way = 0
        self._decodes_under_way = 0
        self._backlog = 0  # prompt tokens that are not sent, of all sequences
        self._begun = 0  # and of those that have been admitted
        self._chunk = 1

    @property
    def waiting(self) -> int:
        """Sequences that have not been admitted."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that have been admitted and are not finished."""
        return len(self._running)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the queue."""
        self._waiting.append(sequence)
        self._grow_backlog(sequence.pending)

    def next(self) -> Microbatch | None:
        """The next microbatch, which is then under way; None if there is nothing to send now."""
        if self._under_way == self.limits.microbatches:
            return None
        pieces = self._decode_pieces()
        decodes = bool(pieces)
        pieces += self._prompt_pieces(self._prompt_room(len(pieces)))
        if not pieces:
            return None
        for piece in pieces:
            piece.sequence.settled = piece.stop
        self._under_way += 1
        self._decodes_under_way += decodes
        return Microbatch(pieces, self._slots.take_changes(), decodes)

    def done(self, microbatch: Microbatch) -> None:
        """The microbatch has run and the tokens it led to are part of their sequences."""
        self._under_way -= 1
        self._decodes_under_way -= microbatch.decodes
        for piece in microbatch.pieces:
            sequence = piece.sequence
            sequence.under_way -= 1
            if piece.is_last and not sequence.finished:
                self._ready.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is; steps of it that are under way come to nothing."""
        if sequence.finished:
            return
        sequence.finished = True
        if sequence.slot is None:
            self._waiting.remove(sequence)
            self._backlog -= sequence.pending
            return
        self._leave(sequence)
        self._slots.retire(sequence)

    def _decode_pieces(self) -> list[Piece]:
        """An even share of the sequences that decode, as far as they are ready."""
        if self._decodes_under_way >= self.decode_groups:
            return []
        share = -(-(len(self._running) - len(self._prompts)) // self.decode_groups)
        pieces: list[Piece] = []
        stalled: list[Sequence] = []
        while self._ready and len(pieces) < share:
            sequence = self._ready.popleft()
            if not self._slots.is_full(sequence) or self._grow(sequence):
                pieces.append(_send(sequence, 1))
            elif sequence.slot is not None:
                stalled.append(sequence)
        self._ready.extendleft(reversed(stalled))
        return pieces

    def _prompt_room(self, decodes: int) -> int:
        """Prompt tokens for a microbatch with so many sequences that decode."""
        chunk = self.limits.prefill_chunk
        if chunk is None:
            decoding = len(self._running) > len(self._prompts)
            chunk = min(self._chunk, self._even_share()) if decoding else self._chunk
        return min(chunk, self.limits.tokens - decodes)

    def _even_share(self) -> int:
        """The prompts that may run now, dealt out to one round of microbatches: these pass through
        the stages behind each other, where a short one would wait for a long one."""
        places = self.limits.sequences - len(self._running)
        waiting = max(1, len(self._waiting))
        tokens = self._begun + (self._backlog - self._begun) * min(1.0, places / waiting)
        return max(_STREAM_TOKENS, min(_BESIDE_DECODING, math.ceil(tokens / self.decode_groups)))

    def _prompt_pieces(self, room: int) -> list[Piece]:
        """The oldest prompts, up to `room` tokens."""
        pieces: list[Piece] = []
        while room > 0 and (self._prompts or self._admit()):
            piece = _send(self._prompts[0], room)
            if piece.is_last:
                self._prompts.popleft()
            pieces.append(piece)
            tokens = piece.stop - piece.start
            room -= tokens
            self._backlog -= tokens
            self._begun -= tokens
        return pieces

    def _admit(self) -> bool:
        """Let the first of the waiting sequences in, if it fits."""
        if not self._waiting or len(self._running) == self.limits.sequences:
            return False
        sequence = self._waiting[0]
        pending = sequence.pending
        if not self._slots.admit(sequence):
            return False
        self._waiting.popleft()
        self._running[sequence] = None
        self._prompts.append(sequence)
        self._backlog -= pending - sequence.pending
        self._begun += sequence.pending
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """Find memory for a sequence that is full, if need be that of the youngest; False if that
        is in a microbatch or the sequence itself, which then waits."""
        while not self._slots.grow(sequence):
            youngest = next(reversed(self._running))
            if youngest.under_way:
                return False
            self._leave(youngest)
            self._slots.evict(youngest)
            self._waiting.appendleft(youngest)
            self._grow_backlog(youngest.pending)
            if youngest is sequence:
                return False
        return True

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence out of every queue."""
        del self._running[sequence]
        if sequence in self._prompts:
            self._prompts.remove(sequence)
            self._backlog -= sequence.pending
            self._begun -= sequence.pending
        elif sequence in self._ready:
            self._ready.remove(sequence)

    def _grow_backlog(self, tokens: int) -> None:
        self._backlog += tokens
        self._chunk = chunk_size(self._backlog, self.limits.stages, self.limits.tokens)


def groups_for(total: float, slowest: float, most: int) -> int:
    """Microbatches that keep the slowest stage busy, from measured times of one step.

    total: of all stages, with what rank 0 does between steps; slowest: of the stage that takes
    longest. While a microbatch is away from that stage for the rest of `total`, others must fill
    its time; more than needed would only read the weights more often.
    """
    return max(1, min(most, math.ceil(total / slowest - _NEGLIGIBLE_GAP)))


def chunk_size(tokens: int, stages: int, longest: int) -> int:
    """Tokens a chunk of prompts of `tokens`: at most `longest`, and all chunks about equal.

    Prompts in m chunks take m + stages - 1 rounds, of which each costs one reading of a rank's
    weights and the arithmetic of tokens / m tokens. That is least for chunks of
    sqrt(tokens * _STREAM_TOKENS / (stages - 1)); a single stage takes the longest chunks there are.
    """
    wanted = longest
    if stages > 1:
        best = math.sqrt(tokens * _STREAM_TOKENS / (stages - 1))
        wanted = min(longest, max(1, round(best)))
    chunks = -(-tokens // wanted)
    return -(-tokens // chunks)


def _send(sequence: Sequence, most: int) -> Piece:
    """The next tokens of a sequence, at most `most`, as sent."""
    start = sequence.sent
    sequence.sent = min(start + most, len(sequence.ids))
    sequence.under_way += 1
    return Piece(sequence, start, sequence.sent, is_last=not sequence.pending)
