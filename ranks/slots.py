"""Rank 0's book of the KV cache: which slot holds what, how much memory each has, what is shared.

The book moves no memory. What it decides it writes down as `SlotChange`s, which travel with the
next step, so that every rank does the same before it runs that step. Steps run in order on every
rank: a slot may be given away while older steps on it are still under way.
"""

from __future__ import annotations

from bisect import bisect_left

from buddy_pipeline.compile.manifest import KV_BLOCK
from buddy_pipeline.ranks.messages import SlotChange
from buddy_pipeline.ranks.sequence import Sequence

_WORTH_SHARING = KV_BLOCK
"""Tokens: a shorter common prefix is computed faster than it is found and copied."""
_SMALLEST_TIER = 256
MOST_CHANGES = 2
"""Of one slot between two steps: its memory is given back, then taken again."""


def kv_tiers(context: int, sizes: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The capacities that a slot may have, in positions, ascending; the last holds `context`.

    sizes: those asked for; None doubles from 256 on.
    """
    if sizes is None:
        sizes = tuple(_SMALLEST_TIER << i for i in range(context.bit_length()))
    whole_blocks = {
        -(-size // KV_BLOCK) * KV_BLOCK for size in (*sizes, context) if size <= context
    }
    return tuple(sorted(whole_blocks))


class Slots:
    """The slots, and the memory that they share.

    slots: places, for sequences that run and for finished ones whose prefix may be wanted again.
    tiers: see `kv_tiers`.
    positions: memory of all slots together, at least the last tier.
    """

    def __init__(self, slots: int, tiers: tuple[int, ...], positions: int) -> None:
        if positions < tiers[-1]:
            raise ValueError(f"{positions} positions hold no sequence of {tiers[-1]}")
        self.changes: list[SlotChange] = []
        """What the ranks have not been told yet, in order."""
        self.positions_left = positions
        self._tiers = tiers
        self._capacity = [0] * slots
        self._empty = list(range(slots - 1, -1, -1))
        self._running: dict[int, Sequence] = {}
        self._retained: dict[int, list[int]] = {}
        """Tokens in the slots of finished sequences, the one longest out of use first."""
        self._starts: dict[tuple[int, ...], set[int]] = {}
        """Slots by the first _WORTH_SHARING tokens of what they hold, if they have as many."""

    def take_changes(self) -> list[SlotChange]:
        """The changes for the next step; they count as told."""
        changes, self.changes = self.changes, []
        return changes

    def is_full(self, sequence: Sequence) -> bool:
        """True if its next token needs a larger tier."""
        assert sequence.slot is not None
        return sequence.sent == self._capacity[sequence.slot]

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot in the smallest tier that fits; False if there is none.

        The longest prefix that a slot has of it, if worth it, is copied (or its slot taken over)
        and counts as sent. The last token is always left to run: its logits are wanted. A sequence
        that would share much of what the microbatch in the making computes is not let in yet.
        """
        source, shared = self._longest_shared(sequence.ids)
        if source in self._running:
            settled = min(shared, self._running[source].settled)
            if settled < _WORTH_SHARING:
                settled = 0
            if shared - settled >= _WORTH_SHARING:
                return False
            source, shared = (source, settled) if settled else (None, 0)
        capacity = self._tier(min(len(sequence.ids) + 1, self._tiers[-1]))
        is_whole = source in self._retained and shared == len(self._retained[source])
        if not is_whole and self._make_room(capacity, needs_slot=True, keep=source):
            slot = self._empty.pop()
            self._set(slot, capacity, slot if source is None else source, shared)
            if source in self._retained:
                self._retained[source] = self._retained.pop(source)  # used last
        elif source in self._retained:
            grown = max(capacity, self._capacity[source])
            if not self._make_room(grown - self._capacity[source], keep=source):
                return False
            slot = source
            del self._retained[source]
            if grown > self._capacity[source]:
                self._set(slot, grown, slot, shared)
        else:
            return False
        self._running[slot] = sequence
        self._note_start(slot, sequence.ids)
        sequence.slot = slot
        sequence.sent = sequence.settled = shared
        sequence.reused = min(shared, sequence.prompt_length)
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Move a sequence that is full up a tier; False if there is no memory for that."""
        slot = sequence.slot
        assert slot is not None
        capacity = self._tier(sequence.sent + 1)
        if not self._make_room(capacity - self._capacity[slot]):
            return False
        self._set(slot, capacity, slot, sequence.sent)
        return True

    def retire(self, sequence: Sequence) -> None:
        """Take a finished sequence out of its slot; what the slot holds is kept while it can be."""
        slot = self._leave(sequence)
        if sequence.sent < _WORTH_SHARING:
            self._release(slot, sequence.ids)
        else:
            self._note_start(slot, sequence.ids)  # it may have been too short for one before
            self._retained[slot] = sequence.ids[: sequence.sent]

    def evict(self, sequence: Sequence) -> None:
        """Take a running sequence's slot and memory away; it has to start again."""
        self._release(self._leave(sequence), sequence.ids)
        sequence.sent = sequence.settled = 0

    def _leave(self, sequence: Sequence) -> int:
        slot = sequence.slot
        assert slot is not None
        del self._running[slot]
        sequence.slot = None
        return slot

    def _tier(self, positions: int) -> int:
        return self._tiers[bisect_left(self._tiers, positions)]

    def _set(self, slot: int, capacity: int, source: int, positions: int) -> None:
        self.positions_left += self._capacity[slot] - capacity
        self._capacity[slot] = capacity
        self.changes.append(SlotChange(slot, capacity, source, positions))

    def _release(self, slot: int, ids: list[int]) -> None:
        """Empty a slot that holds the beginning of `ids`."""
        self._set(slot, 0, slot, 0)
        self._empty.append(slot)
        slots = self._starts.get(_start(ids), set())
        slots.discard(slot)
        if not slots:
            self._starts.pop(_start(ids), None)

    def _note_start(self, slot: int, ids: list[int]) -> None:
        if len(ids) >= _WORTH_SHARING:
            self._starts.setdefault(_start(ids), set()).add(slot)

    def _make_room(
        self, positions: int, *, needs_slot: bool = False, keep: int | None = None
    ) -> bool:
        """Forget retained slots but `keep`, oldest first, until there is room; False, with nothing
        forgotten, if there would not be."""
        spare = [slot for slot in self._retained if slot != keep]
        possible = self.positions_left + sum(self._capacity[slot] for slot in spare)
        if possible < positions or (needs_slot and not self._empty and not spare):
            return False
        for slot in spare:
            if self.positions_left >= positions and (self._empty or not needs_slot):
                break
            self._release(slot, self._retained.pop(slot))
        return True

    def _longest_shared(self, ids: list[int]) -> tuple[int | None, int]:
        """The slot with the longest prefix of `ids` (without the last), and that prefix's length;
        None and 0 if none is worth it."""
        best, longest = None, 0
        for slot in sorted(self._starts.get(_start(ids), ())):
            running = self._running.get(slot)
            tokens = self._retained[slot] if running is None else running.ids
            length = len(tokens) if running is None else running.sent
            shared = _common_prefix(ids, tokens, min(length, len(ids) - 1))
            if shared > longest and shared >= _WORTH_SHARING:
                best, longest = slot, shared
        return best, longest


def _start(ids: list[int]) -> tuple[int, ...]:
    return tuple(ids[:_WORTH_SHARING])


def _common_prefix(a: list[int], b: list[int], limit: int) -> int:
    """Length of the common prefix of the first `limit` elements, by halving: slices compare
    without an interpreted step an element."""
    low, high = 0, limit
    size = min(_WORTH_SHARING, limit)  # most pairs differ at once
    while low < high:
        middle = min(low + size, high)
        if a[low:middle] == b[low:middle]:
            low, size = middle, 2 * size
        else:
            high, size = middle - 1, max(1, (middle - 1 - low + 1) // 2)
    return low
