"""Where the parts of a message lie that travels around the ring of ranks.

Everything is little-endian and lies in ONE contiguous, 64-byte-aligned buffer, so that a step is
one MPI message and the stage works on the received bytes where they lie:

    header                      64 bytes, `HEADER`
    positions[tokens]           int64, place of each token in its sequence
    slots[tokens]               int64, sequence of each token: its place in the KV cache
    ids[tokens]                 int64, vocabulary index of each token
    rows[rows]                  int64, indices of the tokens whose logits are wanted
    changes[changes][4]         int64, a `SlotChange` each: what to do to the KV cache first
    (padding to 64 bytes)
    payload                     `bytes_per_token` bytes a token; for control messages int64 words
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = b"BPLN"
VERSION = 2

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load of the kernels."""
WORD = 8

# magic, version, kind, sequence, tokens, rows, payload bytes, total bytes, times (two words, see
# `Step.times`), changes, reserved (zeros)
HEADER = struct.Struct("<4sHHQIIQQqqI4s")
RESERVED = bytes(4)
TIME_OF_ALL, TIME_OF_SLOWEST = 5, 6
"""Words of the header."""
FIRST_WORD = HEADER.size // WORD
"""Behind it."""
CHANGE_WORDS = 4


class Sizes(NamedTuple):
    """How much of each part a message has, and so where the parts begin."""

    tokens: int
    rows: int
    changes: int
    payload: int
    """Bytes."""

    @property
    def array_words(self) -> tuple[int, int, int, int, int, int]:
        """Where positions, slots, ids, rows and changes begin, and the last ends: 8-byte words."""
        positions = FIRST_WORD
        rows = positions + 3 * self.tokens
        changes = rows + self.rows
        return (
            positions,
            positions + self.tokens,
            positions + 2 * self.tokens,
            rows,
            changes,
            changes + CHANGE_WORDS * self.changes,
        )

    @property
    def array_end(self) -> int:
        """Bytes of header and arrays."""
        return HEADER.size + WORD * (3 * self.tokens + self.rows + CHANGE_WORDS * self.changes)

    @property
    def payload_offset(self) -> int:
        """Bytes before the payload."""
        return align(self.array_end)

    @property
    def total(self) -> int:
        """Bytes of the whole message."""
        return self.payload_offset + self.payload


def write_header(memory: memoryview, kind: int, sequence: int, sizes: Sizes) -> None:
    """Writes the first 64 bytes of a message; no stage has taken time for it yet."""
    HEADER.pack_into(
        memory,
        0,
        MAGIC,
        VERSION,
        kind,
        sequence,
        sizes.tokens,
        sizes.rows,
        sizes.payload,
        sizes.total,
        0,
        0,
        sizes.changes,
        RESERVED,
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
    return Sizes(max_tokens, max_rows, max_changes, align(payload)).total


def align(size: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
