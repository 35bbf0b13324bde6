"""The one message that travels around the ring of ranks: begun in a buffer, sent, and decoded.

`message_layout` says where its parts lie. A received message is never trusted: `StepBuffer.decode`
checks every count against the capacity of the buffer and the number of bytes that really arrived
before it makes a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from buddy_pipeline.ranks.message_layout import (
    ALIGNMENT,
    CHANGE_WORDS,
    FIRST_WORD,
    HEADER,
    MAGIC,
    RESERVED,
    TIME_OF_ALL,
    TIME_OF_SLOWEST,
    VERSION,
    WORD,
    Sizes,
    align,
    buffer_bytes,
    write_header,
)

_SEQUENCE_END = 1 << 64


class ProtocolError(Exception):
    """A message that breaks the format; says which field, its value and what was expected."""


class Kind(IntEnum):
    """What a message asks of the rank that receives it."""

    STEP = 1
    """Run the stage on these tokens and send its output on."""
    PEAK_MEMORY = 2
    """Append this process's peak memory to the payload (one int64, bytes) and send it on."""
    STOP = 3
    """Send this on and leave the loop: no message follows."""


class SlotChange(NamedTuple):
    """New memory for a slot of the KV cache, on every rank, before the step that says so runs."""

    slot: int
    capacity: int
    """Positions that the slot has room for from now on; 0 gives its memory back."""
    source: int
    """The slot whose first positions are copied: itself when it grows."""
    positions: int
    """How many are copied; 0 to begin empty."""


@dataclass(frozen=True)
class Bounds:
    """What a step may refer to; values from 0 up to, and without, these numbers are valid."""

    context: int
    """Positions a slot of the KV cache has room for."""
    slots: int
    """Sequences the KV cache has room for."""
    vocab: int
    """Rows of the embedding matrix."""


@dataclass(slots=True)
class Step:
    """One message as views over its buffer; valid until the buffer is written or received into.

    A buffer makes new views only for a message of another shape than the one before: between two
    steps of a pipeline the weights of a whole block have passed through the caches, and whatever
    Python touches then comes from memory.
    """

    kind: Kind
    sequence: int
    """Running number that rank 0 gives each message it starts."""
    tokens: int
    positions: np.ndarray
    """int64 [tokens]"""
    slots: np.ndarray
    """int64 [tokens]"""
    ids: np.ndarray
    """int64 [tokens]"""
    rows: np.ndarray
    """int64 [n_rows], indices into the tokens"""
    changes: np.ndarray
    """int64 [n_changes, 4], fields of `SlotChange`; checked where they are applied"""
    payload: np.ndarray
    """uint8 [payload bytes], starts at a multiple of 64 bytes"""
    message: np.ndarray
    """uint8 [total bytes], all of the above and the header: what is sent"""
    words: memoryview
    """The whole buffer as int64: quicker than an array to read and write single words."""
    address: int
    """Address of the first byte of `message`, a multiple of 64."""

    @property
    def times(self) -> tuple[int, int]:
        """Nanoseconds that the stages so far took for this step: their sum, the slowest."""
        return self.words[TIME_OF_ALL], self.words[TIME_OF_SLOWEST]

    @property
    def positions_address(self) -> int:
        return self._array_address(0)

    @property
    def slots_address(self) -> int:
        return self._array_address(1)

    @property
    def ids_address(self) -> int:
        return self._array_address(2)

    @property
    def rows_address(self) -> int:
        return self._array_address(3)

    @property
    def payload_address(self) -> int:
        return self.address + len(self.message) - len(self.payload)

    @property
    def payload_words(self) -> np.ndarray:
        """int64 [payload bytes / 8]: the payload of a control message."""
        return self.payload.view("<i8")

    def add_time(self, nanoseconds: int) -> None:
        """Account for one more stage that has run this step."""
        words = self.words
        words[TIME_OF_ALL] += nanoseconds
        words[TIME_OF_SLOWEST] = max(words[TIME_OF_SLOWEST], nanoseconds)

    def _array_address(self, before: int) -> int:
        """Address of the array that this many arrays of a word a token are before."""
        return self.address + HEADER.size + WORD * before * self.tokens


class StepBuffer:
    """Aligned memory for one message, allocated once and used for message after message.

    max_tokens, max_rows: the most a step may carry.
    bytes_per_token: payload of a step, bytes a token.
    min_payload: bytes of payload there must be room for whatever the tokens (control messages).
    max_changes: the most slot changes that a step may carry.
    """

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        bytes_per_token: int,
        min_payload: int = 0,
        max_changes: int = 0,
    ) -> None:
        if max_tokens < 1 or min(max_rows, bytes_per_token, min_payload, max_changes) < 0:
            raise ValueError(
                f"StepBuffer({max_tokens}, {max_rows}, {bytes_per_token}, {min_payload}, "
                f"{max_changes}): needs at least one token and no negative size"
            )
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.max_changes = max_changes
        self.bytes_per_token = bytes_per_token
        self.max_payload = max(max_tokens * bytes_per_token, align(min_payload))
        self.capacity = buffer_bytes(
            max_tokens, max_rows, bytes_per_token, min_payload, max_changes
        )
        allocation = np.zeros(self.capacity + ALIGNMENT, dtype=np.uint8)
        skip = -allocation.ctypes.data % ALIGNMENT
        self.memory: np.ndarray = allocation[skip : skip + self.capacity]
        """uint8 [capacity]: what a receive is posted into."""
        self.address: int = self.memory.ctypes.data
        self._header = self.memory[: HEADER.size].data
        self._array = self.memory.view("<i8")
        self._words = self.memory.data.cast("q")
        # Read as unsigned, a negative number is huge: one comparison checks both ends of a range.
        self._unsigned = self.memory.data.cast("Q")
        self._latest: Step | None = None
        self._latest_shape: tuple[Kind, Sizes] | None = None

    def begin(
        self,
        kind: Kind,
        sequence: int,
        tokens: int = 0,
        rows: int = 0,
        payload: int = 0,
        changes: int = 0,
    ) -> Step:
        """Start a message in place: write its header and return the views for the caller to fill.

        The payload of a STEP is `tokens * bytes_per_token` bytes; of other kinds `payload` bytes.
        Raises ValueError for what the buffer has no room for.
        """
        if kind is Kind.STEP:
            payload = tokens * self.bytes_per_token
        if (
            not (0 <= tokens <= self.max_tokens and 0 <= rows <= self.max_rows)
            or not (0 <= payload <= self.max_payload and 0 <= changes <= self.max_changes)
            or not 0 <= sequence < _SEQUENCE_END
        ):
            raise ValueError(
                f"message {sequence} with {tokens} tokens, {rows} rows, {payload} payload bytes, "
                f"{changes} changes: the buffer has room for {self.max_tokens}, {self.max_rows}, "
                f"{self.max_payload}, {self.max_changes}"
            )
        sizes = Sizes(tokens, rows, changes, payload)
        write_header(self._header, kind, sequence, sizes)
        return self._views(kind, sequence, sizes)

    def carry_on(self, step: Step, payload: int = 0) -> Step:
        """Start the message that carries `step`, received in another buffer, to the next rank.

        Header and arrays are copied; the payload, sized as in `begin`, is left to be filled.
        """
        rows, changes = len(step.rows), len(step.changes)
        following = self.begin(step.kind, step.sequence, step.tokens, rows, payload, changes)
        end = Sizes(step.tokens, rows, changes, payload).array_end // WORD
        for start, stop in ((TIME_OF_ALL, TIME_OF_SLOWEST + 1), (FIRST_WORD, end)):
            following.words[start:stop] = step.words[start:stop]
        return following

    def decode(self, received: int, bounds: Bounds | None = None) -> Step:
        """Views of the message of `received` bytes at the start of the buffer, after checking it.

        Raises ProtocolError naming the first field that is wrong. Positions, slots and ids are
        checked if `bounds` are given; rows always.
        """
        if not HEADER.size <= received <= self.capacity:
            raise ProtocolError(
                f"message of {received} bytes: expected {HEADER.size} to {self.capacity}"
            )
        magic, version, number, sequence, tokens, rows, payload, total, _, _, changes, reserved = (
            HEADER.unpack_from(self._header)
        )
        if magic != MAGIC:
            raise ProtocolError(f"message starts with {magic!r}: expected {MAGIC!r}")
        if version != VERSION:
            raise ProtocolError(
                f"message format version {version}: this rank speaks version {VERSION}; "
                "install the same buddy-pipeline on every host"
            )
        if number not in _KINDS:
            raise ProtocolError(f"message kind {number}: expected one of {sorted(_KINDS)}")
        if reserved != RESERVED:
            raise ProtocolError(f"reserved header bytes {reserved.hex()}: expected zeros")
        kind = _KINDS[number]
        sizes = Sizes(tokens, rows, changes, payload)
        self._check_sizes(kind, sizes)
        if total != sizes.total:
            raise ProtocolError(f"header says {total} bytes in all: its counts make {sizes.total}")
        if received != total:
            raise ProtocolError(f"{received} bytes arrived: the header says {total}")
        self._check_values(sizes, bounds)
        return self._views(kind, sequence, sizes)

    def _check_sizes(self, kind: Kind, sizes: Sizes) -> None:
        tokens, rows, changes, payload = sizes
        if kind is Kind.STEP:
            if not 1 <= tokens <= self.max_tokens:
                raise ProtocolError(f"{tokens} tokens in a step: expected 1 to {self.max_tokens}")
            if rows > self.max_rows:
                raise ProtocolError(f"{rows} rows in a step: expected at most {self.max_rows}")
            if changes > self.max_changes:
                raise ProtocolError(
                    f"{changes} slot changes in a step: expected at most {self.max_changes}"
                )
            if payload != tokens * self.bytes_per_token:
                raise ProtocolError(
                    f"{payload} payload bytes for {tokens} tokens: "
                    f"expected {self.bytes_per_token} a token"
                )
            return
        if tokens or rows or changes:
            raise ProtocolError(
                f"{tokens} tokens, {rows} rows and {changes} slot changes in {kind.name}: "
                "expected none"
            )
        room = self.max_payload if kind is Kind.PEAK_MEMORY else 0
        if payload > room or payload % WORD:
            raise ProtocolError(
                f"{payload} payload bytes in {kind.name}: "
                f"expected a multiple of {WORD}, at most {room}"
            )

    def _check_values(self, sizes: Sizes, bounds: Bounds | None) -> None:
        positions, slots, ids, rows, *_ = sizes.array_words
        if bounds is not None:
            self._check_range("position", positions, sizes.tokens, bounds.context)
            self._check_range("slot", slots, sizes.tokens, bounds.slots)
            self._check_range("id", ids, sizes.tokens, bounds.vocab)
        self._check_range("row", rows, sizes.rows, sizes.tokens)

    def _check_range(self, name: str, start: int, count: int, end: int) -> None:
        if count and max(self._unsigned[start : start + count]) >= end:
            values = self._array[start : start + count]
            index = int(np.argmax((values < 0) | (values >= end)))
            raise ProtocolError(f"{name} {values[index]} of token {index}: expected 0 to {end - 1}")

    def _views(self, kind: Kind, sequence: int, sizes: Sizes) -> Step:
        shape = (kind, sizes)
        if self._latest is None or self._latest_shape != shape:
            self._latest, self._latest_shape = self._new_views(kind, sizes), shape
        self._latest.sequence = sequence
        return self._latest

    def _new_views(self, kind: Kind, sizes: Sizes) -> Step:
        positions, slots, ids, rows, changes, end = sizes.array_words
        payload = sizes.payload_offset
        total = payload + sizes.payload
        return Step(
            kind=kind,
            sequence=0,
            tokens=sizes.tokens,
            positions=self._array[positions:slots],
            slots=self._array[slots:ids],
            ids=self._array[ids:rows],
            rows=self._array[rows:changes],
            changes=self._array[changes:end].reshape(sizes.changes, CHANGE_WORDS),
            payload=self.memory[payload:total],
            message=self.memory[:total],
            words=self._words,
            address=self.address,
        )


_KINDS = {kind.value: kind for kind in Kind}
