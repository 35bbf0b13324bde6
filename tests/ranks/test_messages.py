"""A message decodes to what was encoded, and a broken one never decodes to more than it holds."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.ranks.message_layout import ALIGNMENT
from buddy_pipeline.ranks.messages import Bounds, Kind, ProtocolError, Step, StepBuffer

MAX_TOKENS, MAX_ROWS, BYTES_PER_TOKEN = 7, 3, 20
BOUNDS = Bounds(context=32, slots=2, vocab=11)

# Offsets of header fields, written out: the format is a contract between hosts.
VERSION, KIND, TOKENS, ROWS, PAYLOAD, TOTAL, RESERVED = 4, 6, 16, 20, 24, 32, 60
POSITIONS = 64


def buffer() -> StepBuffer:
    return StepBuffer(MAX_TOKENS, MAX_ROWS, BYTES_PER_TOKEN, min_payload=16)


def written_step(into: StepBuffer, tokens: int = 3, rows: int = 1) -> Step:
    step = into.begin(Kind.STEP, 5, tokens, rows)
    step.positions[:] = np.arange(tokens) + 4
    step.slots[:] = 1
    step.ids[:] = np.arange(tokens) + 2
    step.rows[:] = tokens - 1
    step.payload[:] = np.arange(len(step.payload)) % 251
    return step


def sent(step: Step) -> tuple[StepBuffer, int]:
    """The buffer of another rank after it has received the message, and the bytes it received."""
    target = buffer()
    target.memory[: len(step.message)] = step.message
    return target, len(step.message)


@given(tokens=st.integers(1, MAX_TOKENS), rows=st.integers(0, MAX_ROWS))
def test_decoding_gives_what_was_written(tokens: int, rows: int) -> None:
    step = written_step(buffer(), tokens, rows)
    target, received = sent(step)
    arrived = target.decode(received, BOUNDS)
    assert (arrived.kind, arrived.sequence, arrived.tokens) == (Kind.STEP, 5, tokens)
    for name in ("positions", "slots", "ids", "rows", "payload", "message"):
        np.testing.assert_array_equal(getattr(arrived, name), getattr(step, name))


@given(tokens=st.integers(1, MAX_TOKENS), rows=st.integers(1, MAX_ROWS))
def test_addresses_are_those_of_the_views(tokens: int, rows: int) -> None:
    step = written_step(buffer(), tokens, rows)
    for name in ("positions", "slots", "ids", "rows", "payload"):
        assert getattr(step, f"{name}_address") == getattr(step, name).ctypes.data
    assert step.address == step.message.ctypes.data
    assert step.address % ALIGNMENT == 0
    assert step.payload_address % ALIGNMENT == 0


def test_carrying_on_copies_the_tokens_and_resizes_the_payload() -> None:
    step = written_step(buffer())
    onward = StepBuffer(MAX_TOKENS, MAX_ROWS, 8).carry_on(step)
    for name in ("positions", "slots", "ids", "rows"):
        np.testing.assert_array_equal(getattr(onward, name), getattr(step, name))
    assert (onward.kind, onward.sequence, len(onward.payload)) == (Kind.STEP, 5, 8 * 3)


def test_control_messages_carry_words() -> None:
    message = buffer().begin(Kind.PEAK_MEMORY, 0, payload=16)
    message.payload_words[:] = [1 << 40, 7]
    target, received = sent(message)
    assert target.decode(received).payload_words.tolist() == [1 << 40, 7]


@pytest.mark.parametrize(
    ("tokens", "rows", "payload"), [(MAX_TOKENS + 1, 0, 0), (1, MAX_ROWS + 1, 0), (-1, 0, 0)]
)
def test_a_step_beyond_the_capacity_cannot_be_begun(tokens: int, rows: int, payload: int) -> None:
    with pytest.raises(ValueError, match="room for 7, 3"):
        buffer().begin(Kind.STEP, 0, tokens, rows, payload)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (0, "<I", 0, "message starts with"),
        (VERSION, "<H", 1, "format version 1"),
        (KIND, "<H", 99, "message kind 99"),
        (KIND, "<H", Kind.STOP, "3 tokens, 1 rows and 0 slot changes in STOP"),
        (TOKENS, "<I", 0, "0 tokens in a step"),
        (TOKENS, "<I", 0xFFFFFFFF, "4294967295 tokens in a step: expected 1 to 7"),
        (ROWS, "<I", MAX_ROWS + 1, "4 rows in a step: expected at most 3"),
        (PAYLOAD, "<Q", 0, "0 payload bytes for 3 tokens"),
        (PAYLOAD, "<Q", (1 << 64) - 8, "payload bytes for 3 tokens"),
        (TOTAL, "<Q", 64, "header says 64 bytes in all"),
        (RESERVED, "<I", 1, "reserved header bytes"),
        (POSITIONS, "<q", -1, "position -1 of token 0: expected 0 to 31"),
        (POSITIONS + 8, "<q", 32, "position 32 of token 1"),
        (POSITIONS + 24, "<q", 2, "slot 2 of token 0: expected 0 to 1"),
        (POSITIONS + 64, "<q", 11, "id 11 of token 2: expected 0 to 10"),
        (POSITIONS + 72, "<q", 3, "row 3 of token 0: expected 0 to 2"),
    ],
)
def test_a_wrong_field_is_named(offset: int, layout: str, value: int, message: str) -> None:
    target, received = sent(written_step(buffer()))
    struct.pack_into(layout, target.memory.data, offset, value)
    with pytest.raises(ProtocolError, match=message):
        target.decode(received, BOUNDS)


@given(received=st.integers(0, 1000))
def test_any_other_length_is_refused(received: int) -> None:
    step = written_step(buffer())
    target, length = sent(step)
    if received != length:
        with pytest.raises(ProtocolError, match="bytes"):
            target.decode(received, BOUNDS)


@given(
    flips=st.lists(st.tuples(st.integers(0, 159), st.integers(0, 255)), min_size=1, max_size=12),
    cut=st.integers(0, 60),
)
def test_a_corrupted_message_is_refused_or_within_bounds(
    flips: list[tuple[int, int]], cut: int
) -> None:
    target, received = sent(written_step(buffer()))
    for offset, value in flips:
        target.memory[offset] = value
    try:
        step = target.decode(received - cut, BOUNDS)
    except ProtocolError:
        return
    end = target.address + target.capacity
    assert step.payload_address + len(step.payload) <= end
    assert len(step.message) == received - cut
    assert len(step.payload) == (step.tokens * BYTES_PER_TOKEN if step.kind is Kind.STEP else 0)
    for values, limit in (
        (step.positions, BOUNDS.context),
        (step.slots, BOUNDS.slots),
        (step.ids, BOUNDS.vocab),
        (step.rows, step.tokens),
    ):
        assert np.all((values >= 0) & (values < limit))


@given(st.binary(max_size=buffer().capacity))
def test_noise_is_refused(noise: bytes) -> None:
    target = buffer()
    target.memory[: len(noise)] = np.frombuffer(noise, dtype=np.uint8)
    with pytest.raises(ProtocolError):
        target.decode(len(noise), BOUNDS)
