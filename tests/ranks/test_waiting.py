"""Waiting ends when it is over, and leaves the cores alone meanwhile."""

import time

import pytest

from buddy_pipeline.ranks import waiting
from buddy_pipeline.ranks.waiting import EXCLUSIVE, IDLE, SHARED, Patience


@pytest.mark.parametrize("patience", [EXCLUSIVE, SHARED, IDLE])
@pytest.mark.parametrize("polls", [1, 2, 5, 40])
def test_it_polls_until_done_and_not_once_more(patience: Patience, polls: int) -> None:
    answers = iter([False] * (polls - 1) + [True])
    patience.until(lambda: next(answers))
    with pytest.raises(StopIteration):
        next(answers)


def test_pauses_grow_to_the_longest_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(waiting.time, "sleep", pauses.append)
    SHARED.until(lambda: len(pauses) > 30)
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1] == SHARED.longest_pause_s


def test_a_long_wait_uses_little_of_a_core() -> None:
    start, used = time.monotonic(), time.process_time()
    SHARED.until(lambda: time.monotonic() - start > 0.3)
    assert time.process_time() - used < 0.15


@pytest.mark.parametrize("patience", [EXCLUSIVE, SHARED])
def test_pauses_grow_further_only_after_seconds(
    patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pauses = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        pauses.append((now, seconds))
        now += seconds

    def clock() -> float:
        nonlocal now
        now += 1e-6
        return now

    monkeypatch.setattr(waiting.time, "sleep", sleep)
    monkeypatch.setattr(waiting.time, "perf_counter", clock)
    patience.until(lambda: now > 10)
    for waited, pause in pauses:
        assert pause <= max(patience.longest_pause_s, waited / 900)
    assert sum(waited > 5 for waited, _ in pauses) < 5 / 1.9e-3
