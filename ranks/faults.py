"""How a job ends when something goes wrong on some rank: one message, no hang, a non-zero exit."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, TypeVar

import numpy as np

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.error_lines import (
    FAILURE,
    SIGNAL_BASE,
    USER_ERROR,
    describe,
    print_error,
)
from buddy_pipeline.ranks.mpi_launcher import detect_launcher
from buddy_pipeline.ranks.waiting import IDLE
from buddy_pipeline.ranks.world import World

_T = TypeVar("_T")

# One byte that says whether the rank failed, then its message, cut to fit.
_REPORT_BYTES = 4096
#: How long a launcher may take to end ranks after one has died.
_LAUNCHER_S = 2.0


class CollectiveExit(SystemExit):
    """The end of this process at a place where no other rank waits for it."""


def agree(world: World, error: str | None) -> None:
    """Compare notes after preparation that each rank did alone; every rank must call this.

    error: one line on what the user must mend, None if this rank is ready.

    Returns on all ranks if all are ready. Otherwise rank 0 prints each distinct message once, and
    CollectiveExit(2) is raised on all. Waits by polling: a rank that is ready leaves its cores to
    those that still compile.
    """
    errors = [error] if world.comm is None else _exchange(world, error)
    if all(each is None for each in errors):
        return
    if world.rank == 0:
        for line in _distinct(errors):
            print_error(line)
    raise CollectiveExit(USER_ERROR)


def together(world: World, prepare: Callable[[], _T]) -> _T:
    """What a preparation gives, which every rank makes; a user's error on any rank ends all."""
    if world.comm is None:
        return prepare()
    outcome: _T | UserError
    try:
        outcome = prepare()
    except UserError as mistake:
        outcome = mistake
    agree(world, str(outcome) if isinstance(outcome, UserError) else None)
    assert not isinstance(outcome, UserError)
    return outcome


def exit_alone(error: UserError) -> NoReturn:
    """End a process that nobody waits for; one rank of each host prints why, exit code 2.

    For a process that could not join the world, and for rank 0 once `Engine.close` has sent the
    others home.
    """
    try:
        launcher = detect_launcher()
    except UserError:
        launcher = None
    if launcher is None or not launcher.local_rank:
        print_error(str(error))
    raise CollectiveExit(USER_ERROR)


@contextmanager
def guarded(world: World, *, show_traceback: bool = False) -> Iterator[None]:
    """Run a rank's work so that whatever ends it early ends the whole job.

    Without this an exception would leave Python through MPI_Finalize, which waits for the other
    ranks, while these wait for a message. SIGTERM, SIGINT and SIGHUP become a SystemExit on the
    main thread, so that `finally` clauses run; a second one kills at once. An exit with code 0 is
    taken for the regular end, at which all ranks meet.
    """
    endings = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which is what nohup asks for
        endings.append(signal.SIGHUP)  # MPICH's libraries catch it, and go on
    previous = {each: signal.signal(each, _on_signal) for each in endings}
    try:
        yield
    except SystemExit as leaving:
        if isinstance(leaving, CollectiveExit) or _exit_code(leaving) == 0:
            raise
        _abort(world, _exit_code(leaving))
    except BaseException as error:
        fatal(world, error, show_traceback=show_traceback)
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def fatal(world: World, error: BaseException, *, show_traceback: bool = False) -> NoReturn:
    """Print one line about an error that only this rank has, and end the job on all ranks.

    Message and exit code are `describe`'s. A world of one raises the code as a SystemExit; else
    MPI_Abort ends this process without returning, and what mpirun makes of the code is its own
    affair, except that it is not 0 (MPICH's often has 9, for the ranks that it killed).
    """
    if world.comm is not None and type(error).__module__.startswith("mpi4py."):
        _let_the_launcher_speak(world)
    text, code = describe(error, show_traceback=show_traceback)
    if text:
        print_error(_of_rank(world, text))
    _abort(world, code)


def _let_the_launcher_speak(world: World) -> None:
    """A message fails when the rank at its other end dies, whose supervisor says so better; then
    the launcher ends us. Where it does not, the failure is our own to tell."""
    try:
        time.sleep(_LAUNCHER_S)
    except SystemExit as leaving:
        _abort(world, _exit_code(leaving))


def end_now(world: World, text: str) -> NoReturn:
    """Print one line and end the job on all ranks, from any thread, whatever the others do."""
    print_error(_of_rank(world, text))
    if world.comm is None:
        os._exit(FAILURE)
    _abort(world, FAILURE)


def _of_rank(world: World, text: str) -> str:
    if world.comm is None:
        return text
    return f"rank {world.rank} of {world.world} on {world.hostname}: {text}"


def _abort(world: World, code: int) -> NoReturn:
    if world.comm is not None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a reader that has gone, a stream that is closed
                stream.flush()
        # The library would add a line of its own for every rank that aborts.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        world.comm.Abort(code)
    raise SystemExit(code)


def _on_signal(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(SIGNAL_BASE + number)


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    return leaving.code if isinstance(leaving.code, int) else FAILURE


def _exchange(world: World, error: str | None) -> list[str | None]:
    """The error of every rank, by rank."""
    mine = np.zeros(_REPORT_BYTES, dtype=np.uint8)
    if error is not None:
        # Arguments and file names that are not UTF-8 are in it as half characters.
        text = error.encode(errors="backslashreplace")[: _REPORT_BYTES - 1]
        mine[0] = 1
        mine[1 : 1 + len(text)] = np.frombuffer(text, dtype=np.uint8)
    all_reports = np.empty((world.world, _REPORT_BYTES), dtype=np.uint8)
    request = world.comm.Iallgather(mine, all_reports)
    IDLE.until(request.Test)
    return [
        report[1:].tobytes().rstrip(b"\0").decode(errors="ignore") if report[0] else None
        for report in all_reports
    ]


def _distinct(errors: list[str | None]) -> list[str]:
    """Each message once, prefixed with its ranks unless all ranks have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, error in enumerate(errors):
        if error is not None:
            ranks.setdefault(error, []).append(rank)
    return [
        error
        if len(owners) == len(errors)
        else f"rank{'s' * (len(owners) > 1)} {', '.join(map(str, owners))}: {error}"
        for error, owners in ranks.items()
    ]
