"""A message is seen soon after it came, with few looks, and a wrong guess costs little."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.ranks import arrivals
from buddy_pipeline.ranks.arrivals import Arrivals


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps = 0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.sleeps += 1


def late(waits: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """How late each message was seen, seconds, and in how many sleeps; it comes so many seconds
    after the one before was seen."""
    clock, seen = Clock(), Arrivals()
    monkeypatch.setattr(arrivals, "time", clock)
    found = []
    for wait in waits:
        due, before = clock.now + wait, clock.sleeps
        assert seen.until(lambda due=due: clock.now >= due)
        found.append((clock.now - due, clock.sleeps - before))
    return found


@pytest.mark.parametrize("wait", [0.003, 0.018, 0.18])
def test_messages_that_come_regularly_are_seen_soon_in_few_looks(
    wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = late([wait * (1 + 0.01 * (-1) ** number) for number in range(40)], monkeypatch)
    for lateness, looks in found[10:]:
        assert lateness <= max(60e-6, wait / 200)
        assert looks < 20 + wait / 0.0002 / 3  # a third of the looks of who looks every 0.2 ms


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=40))
def test_a_message_is_never_late_by_more_than_a_quarter_of_its_wait(waits: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for wait, (lateness, _) in zip(waits, late(waits, patch), strict=True):
            assert lateness <= max(200e-6, min(wait / 4, 2e-3)) * (1 + 1e-9)


def test_another_kind_of_step_is_soon_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    found = late([0.2] * 20 + [0.005] * 20, monkeypatch)
    assert found[20][0] > 200e-6
    assert all(lateness <= 200e-6 for lateness, _ in found[22:])


def test_who_idles_for_a_minute_looks_every_two_milliseconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ((lateness, looks),) = late([60.0], monkeypatch)
    assert lateness <= 2e-3
    assert looks < 1.3 * 60 / 2e-3


def test_what_does_not_come_in_time_is_not_taken_for_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, seen = Clock(), Arrivals()
    monkeypatch.setattr(arrivals, "time", clock)
    for _ in range(3):
        assert not seen.until(lambda: False, 0.5)
    assert clock.now < 3 * 0.51
    begun, due = clock.now, clock.now + 0.0001
    assert seen.until(lambda: clock.now >= due)
    assert clock.now - begun < 0.0003
