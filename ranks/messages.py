"""The one message that travels around the ring of ranks: header, token arrays and payload.

Everything is little-endian and lies in ONE contiguous, 64-byte-aligned buffer, so that a step is
one MPI message and the stage works on the received bytes where they lie:

    header                      64 bytes, `_HEADER`
    positions[tokens]           int64, place of each token in its sequence
    slots[tokens]               int64, sequence of each token: its place in the KV cache
    ids[tokens]                 int64, vocabulary index of each token
    rows[rows]                  int64, indices of the tokens whose logits are wanted
    changes[changes][4]         int64, a `SlotChange` each: what to do to the KV cache first
    (padding to 64 bytes)
    payload                     `bytes_per_token` bytes a token; for control messages int64 words

A received message is never trusted: `StepBuffer.decode` checks every count against the capacity of
the buffer and the number of bytes that really arrived before it makes a view.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

MAGIC = b"BPLN"
VERSION = 2

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load of the kernels."""

# magic, version, kind, sequence, tokens, rows, payload bytes, total bytes, times (two words, see
# `Step.times`), changes, reserved (zeros)
_HEADER = struct.Struct("<4sHHQIIQQqqI4s")
_RESERVED = bytes(4)
_WORD = 8
_TIMES = slice(5, 7)  # words of the header
_CHANGE_WORDS = 4
_SEQUENCE_END = 1 << 64


class ProtocolError(Exception):
    """A message that breaks the format above; says which field, its value and what was expected."""


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


@dataclass(frozen=True, slots=True)
class Step:
    """One message as views over its buffer; valid until the buffer is written or received into."""

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
    times: np.ndarray
    """int64 [2], nanoseconds that the stages so far took for this step: their sum, the slowest"""
    payload: np.ndarray
    """uint8 [payload bytes], starts at a multiple of 64 bytes"""
    message: np.ndarray
    """uint8 [total bytes], all of the above and the header: what is sent"""
    address: int
    """Address of the first byte of `message`, a multiple of 64."""

    @property
    def positions_address(self) -> int:
        return self.address + _HEADER.size

    @property
    def slots_address(self) -> int:
        return self.address + _HEADER.size + _WORD * self.tokens

    @property
    def ids_address(self) -> int:
        return self.address + _HEADER.size + 2 * _WORD * self.tokens

    @property
    def rows_address(self) -> int:
        return self.address + _HEADER.size + 3 * _WORD * self.tokens

    @property
    def payload_address(self) -> int:
        return self.address + len(self.message) - len(self.payload)

    @property
    def payload_words(self) -> np.ndarray:
        """int64 [payload bytes / 8]: the payload of a control message."""
        return self.payload.view("<i8")

    def add_time(self, nanoseconds: int) -> None:
        """Account for one more stage that has run this step."""
        self.times[0] += nanoseconds
        self.times[1] = max(self.times[1], nanoseconds)


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
        self.max_payload = max(max_tokens * bytes_per_token, _align(min_payload))
        self.capacity = buffer_bytes(
            max_tokens, max_rows, bytes_per_token, min_payload, max_changes
        )
        allocation = np.zeros(self.capacity + ALIGNMENT, dtype=np.uint8)
        skip = -allocation.ctypes.data % ALIGNMENT
        self.memory: np.ndarray = allocation[skip : skip + self.capacity]
        """uint8 [capacity]: what a receive is posted into."""
        self.address: int = self.memory.ctypes.data
        self._header = self.memory[: _HEADER.size].data
        self._words = self.memory.view("<i8")
        # Read as unsigned, a negative number is huge: one comparison checks both ends of a range.
        self._unsigned = self.memory.view("<u8")

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
        total = _payload_offset(tokens, rows, changes) + payload
        _HEADER.pack_into(
            self._header,
            0,
            MAGIC,
            VERSION,
            kind,
            sequence,
            tokens,
            rows,
            payload,
            total,
            0,
            0,
            changes,
            _RESERVED,
        )
        return self._views(kind, sequence, tokens, rows, payload, changes)

    def carry_on(self, step: Step, payload: int = 0) -> Step:
        """Start the message that carries `step`, received in another buffer, to the next rank.

        Header and arrays are copied; the payload, sized as in `begin`, is left to be filled.
        """
        rows, changes = len(step.rows), len(step.changes)
        following = self.begin(step.kind, step.sequence, step.tokens, rows, payload, changes)
        start, end = _HEADER.size, _array_end(step.tokens, rows, changes)
        following.message[start:end] = step.message[start:end]
        following.times[:] = step.times
        return following

    def decode(self, received: int, bounds: Bounds | None = None) -> Step:
        """Views of the message of `received` bytes at the start of the buffer, after checking it.

        Raises ProtocolError naming the first field that is wrong. Positions, slots and ids are
        checked if `bounds` are given; rows always.
        """
        if not _HEADER.size <= received <= self.capacity:
            raise ProtocolError(
                f"message of {received} bytes: expected {_HEADER.size} to {self.capacity}"
            )
        magic, version, number, sequence, tokens, rows, payload, total, _, _, changes, reserved = (
            _HEADER.unpack_from(self._header)
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
        if reserved != _RESERVED:
            raise ProtocolError(f"reserved header bytes {reserved.hex()}: expected zeros")
        kind = _KINDS[number]
        self._check_sizes(kind, tokens, rows, payload, changes)
        expected = _payload_offset(tokens, rows, changes) + payload
        if total != expected:
            raise ProtocolError(f"header says {total} bytes in all: its counts make {expected}")
        if received != total:
            raise ProtocolError(f"{received} bytes arrived: the header says {total}")
        self._check_values(tokens, rows, bounds)
        return self._views(kind, sequence, tokens, rows, payload, changes)

    def _check_sizes(self, kind: Kind, tokens: int, rows: int, payload: int, changes: int) -> None:
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
        if payload > room or payload % _WORD:
            raise ProtocolError(
                f"{payload} payload bytes in {kind.name}: "
                f"expected a multiple of {_WORD}, at most {room}"
            )

    def _check_values(self, tokens: int, rows: int, bounds: Bounds | None) -> None:
        at = _HEADER.size // _WORD
        if bounds is not None:
            self._check_range("position", at, tokens, bounds.context)
            self._check_range("slot", at + tokens, tokens, bounds.slots)
            self._check_range("id", at + 2 * tokens, tokens, bounds.vocab)
        self._check_range("row", at + 3 * tokens, rows, tokens)

    def _check_range(self, name: str, start: int, count: int, end: int) -> None:
        if count and int(np.maximum.reduce(self._unsigned[start : start + count])) >= end:
            values = self._words[start : start + count]
            index = int(np.argmax((values < 0) | (values >= end)))
            raise ProtocolError(f"{name} {values[index]} of token {index}: expected 0 to {end - 1}")

    def _views(
        self, kind: Kind, sequence: int, tokens: int, rows: int, payload: int, changes: int
    ) -> Step:
        positions = _HEADER.size // _WORD
        slots = positions + tokens
        ids = slots + tokens
        wanted = ids + tokens
        changed = wanted + rows
        changed_end = changed + _CHANGE_WORDS * changes
        start = _payload_offset(tokens, rows, changes)
        return Step(
            kind=kind,
            sequence=sequence,
            tokens=tokens,
            positions=self._words[positions:slots],
            slots=self._words[slots:ids],
            ids=self._words[ids:wanted],
            rows=self._words[wanted:changed],
            changes=self._words[changed:changed_end].reshape(changes, _CHANGE_WORDS),
            times=self._words[_TIMES],
            payload=self.memory[start : start + payload],
            message=self.memory[: start + payload],
            address=self.address,
        )


def buffer_bytes(
    max_tokens: int,
    max_rows: int,
    bytes_per_token: int,
    min_payload: int = 0,
    max_changes: int = 0,
) -> int:
    """The longest message of a `StepBuffer` of these sizes."""
    payload = max(max_tokens * bytes_per_token, min_payload)
    return _payload_offset(max_tokens, max_rows, max_changes) + _align(payload)


_KINDS = {kind.value: kind for kind in Kind}


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _array_end(tokens: int, rows: int, changes: int) -> int:
    return _HEADER.size + _WORD * (3 * tokens + rows + _CHANGE_WORDS * changes)


def _payload_offset(tokens: int, rows: int, changes: int) -> int:
    return _align(_array_end(tokens, rows, changes))
