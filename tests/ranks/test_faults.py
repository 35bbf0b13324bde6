"""In a world of one, faults end the process by themselves; tests/mpi has those of several ranks."""

import os
import signal
from collections.abc import Callable
from functools import partial

import pytest

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks import faults
from buddy_pipeline.ranks.affinity import CoreShare
from buddy_pipeline.ranks.error_lines import TRACEBACK_VARIABLE
from buddy_pipeline.ranks.faults import CollectiveExit, agree, guarded
from buddy_pipeline.ranks.world import World

ALONE = World(0, 1, 0, (0,), "host", None, CoreShare((0,), exclusive=True))


def exit_code(work: Callable[[], object]) -> object:
    with pytest.raises(SystemExit) as caught, guarded(ALONE):
        work()
    return caught.value.code


def raising(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_a_rank_that_is_ready_goes_on() -> None:
    with guarded(ALONE):
        agree(ALONE, None)


def test_a_rank_that_is_not_ready_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CollectiveExit):
        agree(ALONE, "spec s has no model: name one")
    assert exit_code(lambda: agree(ALONE, "again")) == 2
    assert "buddy-pipeline: error: spec s has no model: name one\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("file f is empty: copy it again"), 2, "file f is empty: copy it again"),
        (RuntimeError("two\n  lines"), 1, "RuntimeError: two lines"),
        (MemoryError(), 1, "MemoryError"),
    ],
)
def test_an_exception_becomes_one_line(
    error: Exception, code: int, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(raising(error)) == code
    assert capfd.readouterr().err == f"buddy-pipeline: error: {line}\n"


def test_the_traceback_is_there_for_who_asks(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    assert exit_code(raising(RuntimeError("boom"))) == 1
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_keeps_its_code(code: int) -> None:
    assert exit_code(raising(SystemExit(code))) == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_work_in_silence_and_cleans_up(
    number: signal.Signals, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    cleaned = []
    request.addfinalizer(partial(signal.signal, number, signal.getsignal(number)))
    signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup

    def work() -> None:
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            cleaned.append(True)

    before = signal.getsignal(number)
    assert exit_code(work) == 128 + number
    assert cleaned == [True]
    assert capfd.readouterr().err == ""
    assert signal.getsignal(number) is before


class _Comm:
    """An MPI whose `Abort` only says that it was asked for."""

    def Abort(self, code: int) -> None:
        raise CollectiveExit(code)


class _MpiError(Exception):
    __module__ = "mpi4py.MPI"


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_failed_message_is_told_only_if_the_launcher_does_not_end_the_rank(
    *, is_ended: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def launcher(seconds: float) -> None:
        if is_ended:
            raise SystemExit(128 + signal.SIGTERM)

    monkeypatch.setattr(faults.time, "sleep", launcher)
    monkeypatch.setattr(faults.os, "dup2", lambda *files: None)
    pair = World(1, 2, 1, (0, 1), "host", _Comm(), CoreShare((0,), exclusive=True))
    with pytest.raises(CollectiveExit) as caught, guarded(pair):
        raise _MpiError("connection reset")
    told = capfd.readouterr().err
    if is_ended:
        assert (caught.value.code, told) == (128 + signal.SIGTERM, "")
    else:
        assert caught.value.code == 1
        assert told.endswith("rank 1 of 2 on host: _MpiError: connection reset\n")


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert (
            exit_code(lambda: (os.kill(os.getpid(), signal.SIGHUP), raising(SystemExit(3))())) == 3
        )
    finally:
        signal.signal(signal.SIGHUP, before)
