"""The one message that travels around the ring of ranks: header, token arrays and payload.

Everything is little-endian and lies in ONE contiguous, 64-byte-aligned buffer, so that a step is
one MPI message and the stage works on the received bytes where they lie:

    header                      64 bytes, `_HEADER`
    positions[tokens]           int64, place of each token in its sequence
    slots[tokens]               int64, sequence of each token: its place in the KV cache
    ids[tokens]                 int64, vocabulary index of each token
    rows[rows]                  int64, indices of the tokens whose logits are wanted
    (padding to 64 bytes)
    payload                     `bytes_per_token` bytes a token; for control messages int64 words

A received message is never trusted: `StepBuffer.decode` checks every count against the capacity of
the buffer and the number of bytes that really arrived before it makes a view.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

MAGIC = b"BPLN"
VERSION = 1

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load of the kernels."""

# magic, version, kind, sequence, tokens, rows, payload bytes, total bytes, reserved (zeros)
_HEADER = struct.Struct("<4sHHQIIQQ24s")
_RESERVED = bytes(24)
_WORD = 8
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


class StepBuffer:
    """Aligned memory for one message, allocated once and used for message after message.

    max_tokens, max_rows: the most a step may carry.
    bytes_per_token: payload of a step, bytes a token.
    min_payload: bytes of payload there must be room for whatever the tokens (control messages).
    """

    def __init__(
        self, max_tokens: int, max_rows: int, bytes_per_token: int, min_payload: int = 0
    ) -> None:
        if max_tokens < 1 or max_rows < 0 or bytes_per_token < 0 or min_payload < 0:
            raise ValueError(
                f"StepBuffer({max_tokens}, {max_rows}, {bytes_per_token}, {min_payload}): "
                "needs at least one token and no negative size"
            )
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self.bytes_per_token = bytes_per_token
        self.max_payload = max(max_tokens * bytes_per_token, _align(min_payload))
        self.capacity = _payload_offset(max_tokens, max_rows) + _align(self.max_payload)
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
        self, kind: Kind, sequence: int, tokens: int = 0, rows: int = 0, payload: int = 0
    ) -> Step:
        """Start a message in place: write its header and return the views for the caller to fill.

        The payload of a STEP is `tokens * bytes_per_token` bytes; of other kinds `payload` bytes.
        Raises ValueError for what the buffer has no room for.
        """
        if kind is Kind.STEP:
            payload = tokens * self.bytes_per_token
        if (
            not (0 <= tokens <= self.max_tokens and 0 <= rows <= self.max_rows)
            or not 0 <= payload <= self.max_payload
            or not 0 <= sequence < _SEQUENCE_END
        ):
            raise ValueError(
                f"message {sequence} with {tokens} tokens, {rows} rows, {payload} payload bytes: "
                f"the buffer has room for {self.max_tokens}, {self.max_rows}, {self.max_payload}"
            )
        total = _payload_offset(tokens, rows) + payload
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
            _RESERVED,
        )
        return self._views(kind, sequence, tokens, rows, payload)

    def carry_on(self, step: Step, payload: int = 0) -> Step:
        """Start the message that carries `step`, received in another buffer, to the next rank.

        Header and token arrays are copied; the payload, sized as in `begin`, is left to be filled.
        """
        following = self.begin(step.kind, step.sequence, step.tokens, len(step.rows), payload)
        start, end = _HEADER.size, _array_end(step.tokens, len(step.rows))
        following.message[start:end] = step.message[start:end]
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
        magic, version, number, sequence, tokens, rows, payload, total, reserved = (
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
        self._check_sizes(kind, tokens, rows, payload)
        expected = _payload_offset(tokens, rows) + payload
        if total != expected:
            raise ProtocolError(f"header says {total} bytes in all: its counts make {expected}")
        if received != total:
            raise ProtocolError(f"{received} bytes arrived: the header says {total}")
        self._check_values(tokens, rows, bounds)
        return self._views(kind, sequence, tokens, rows, payload)

    def _check_sizes(self, kind: Kind, tokens: int, rows: int, payload: int) -> None:
        if kind is Kind.STEP:
            if not 1 <= tokens <= self.max_tokens:
                raise ProtocolError(f"{tokens} tokens in a step: expected 1 to {self.max_tokens}")
            if rows > self.max_rows:
                raise ProtocolError(f"{rows} rows in a step: expected at most {self.max_rows}")
            if payload != tokens * self.bytes_per_token:
                raise ProtocolError(
                    f"{payload} payload bytes for {tokens} tokens: "
                    f"expected {self.bytes_per_token} a token"
                )
            return
        if tokens or rows:
            raise ProtocolError(f"{tokens} tokens and {rows} rows in {kind.name}: expected none")
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

    def _views(self, kind: Kind, sequence: int, tokens: int, rows: int, payload: int) -> Step:
        positions = _HEADER.size // _WORD
        slots = positions + tokens
        ids = slots + tokens
        wanted = ids + tokens
        start = _payload_offset(tokens, rows)
        return Step(
            kind=kind,
            sequence=sequence,
            tokens=tokens,
            positions=self._words[positions:slots],
            slots=self._words[slots:ids],
            ids=self._words[ids:wanted],
            rows=self._words[wanted : wanted + rows],
            payload=self.memory[start : start + payload],
            message=self.memory[: start + payload],
            address=self.address,
        )


_KINDS = {kind.value: kind for kind in Kind}


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _array_end(tokens: int, rows: int) -> int:
    return _HEADER.size + _WORD * (3 * tokens + rows)


def _payload_offset(tokens: int, rows: int) -> int:
    return _align(_array_end(tokens, rows))
