"""Who still runs? With `--step-timeout`, rank 0 calls every other rank again and again.

A rank answers whenever it receives a step or waits for one, or for room to send. One that computes
for too long is ended by its own watchdog; so a rank that neither answers nor ends is stopped or out
of reach. Rank 0 calls from a thread of its own, also while its user thinks or its stage runs: so a
rank that waits and is not called knows the same of rank 0.

While ranks still compile and load, which has no time limit of its own, a thread of each answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from buddy_pipeline.partition.errors import UserError

_CALL, _ANSWER = 2, 3  # tags
_CALLS = 4
"""In the time that a step has."""
_LONGEST_PAUSE_S = 1.0
"""Between two calls."""
GRACE_S = 2.0
"""Beyond the step timeout: a rank's watchdog looks up to a second late."""
_AFTER_ANOTHER_S = 0.25
"""Between the ranks that would say the same: one message is enough."""
PREPARING_S = 10.0
"""The least that a rank may be silent while it compiles or loads: no thread of a process runs while
another imports a library that lies on a slow disk."""
_LOOKS_S = 0.1
"""Between two looks of the thread that attends then."""


class SilentRank(Exception):
    """A rank has not been heard for too long."""


def attendance_of(comm: Any, step_timeout_s: float) -> RollCall | Attendance:
    """This rank's part in the roll call; every rank must take it.

    Raises UserError for an MPI library that has no room for threads.
    """
    from mpi4py import MPI

    _check_threads(MPI)
    return (RollCall if comm.Get_rank() == 0 else Attendance)(comm, step_timeout_s)


@contextmanager
def attended(part: RollCall | Attendance, end: Callable[[str], object]) -> Iterator[None]:
    """Have a thread take this rank's part in the roll call while its main thread prepares steps.

    end: ends the job, with a line that says why.
    """
    over = threading.Event()
    part.least_s = PREPARING_S

    def attend() -> None:
        while not over.wait(_LOOKS_S):
            try:
                part.attend()
            except SilentRank as silent:
                end(f"SilentRank: {silent}")

    thread = threading.Thread(target=attend, name="attendance", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        part.least_s = 0.0


class RollCall:
    """Rank 0's side. A call that has not been answered stays open; nobody is called twice."""

    def __init__(self, comm: Any, step_timeout_s: float) -> None:
        self._comm = comm
        self._timeout_s = step_timeout_s
        self.least_s = 0.0
        """The least that a rank may be silent, if that is more than a step may take."""
        self._open: dict[int, tuple[float, Any, Any, np.ndarray]] = {}
        self._looked = time.monotonic()
        self._lock = threading.Lock()
        self._over = threading.Event()
        pause = min(step_timeout_s / _CALLS, _LONGEST_PAUSE_S)
        self._thread = threading.Thread(target=self._call, args=(pause,), daemon=True)
        self._thread.start()

    def attend(self) -> None:
        """Raise SilentRank if ranks have not answered for longer than a step may take."""
        world = self._comm.Get_size()
        limit_s = max(self._timeout_s, self.least_s) + GRACE_S
        with self._lock:
            now = self._collect()
            silent = sorted(r for r, call in self._open.items() if now - call[0] > limit_s)
        if silent:
            raise SilentRank(
                f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} of {world} "
                f"{'have' if len(silent) > 1 else 'has'} not answered for "
                f"{limit_s:g} s (--step-timeout): stopped or out of reach"
            )

    def close(self) -> None:
        """Call no more, now that the other ranks have left, and forget what they do not answer."""
        self._over.set()
        self._thread.join()
        self._collect()
        for _, answer, _, _ in self._open.values():
            answer.Cancel()
            answer.Wait()

    def _call(self, pause: float) -> None:
        while True:
            with self._lock:
                now = self._collect()
                for rank in range(1, self._comm.Get_size()):
                    if rank not in self._open:
                        memory = np.zeros(2, np.uint8)
                        answer = self._comm.Irecv(memory[:1], rank, _ANSWER)
                        call = self._comm.Isend(memory[1:], rank, _CALL)
                        self._open[rank] = (now, answer, call, memory)
            if self._over.wait(pause):
                return

    def _collect(self) -> float:
        """Close the calls that have been answered; the time.

        If this process was stopped meanwhile, as when a whole job is suspended, that does not
        count: the others may not have run either.
        """
        now = time.monotonic()
        stopped = was_stopped(self._looked, now)
        self._looked = now
        for rank, (begun, answer, call, memory) in list(self._open.items()):
            if answer.Test() and call.Test():
                del self._open[rank]
            else:
                self._open[rank] = (now if stopped else begun, answer, call, memory)
        return now


class Attendance:
    """The other ranks' side: answers, and notices when nobody calls."""

    def __init__(self, comm: Any, step_timeout_s: float) -> None:
        self._comm = comm
        self._timeout_s = step_timeout_s
        self.least_s = 0.0
        """The least that rank 0 may be silent, if that is more than a step may take."""
        self._heard = self._polled = time.monotonic()

    def attend(self) -> None:
        """Answer if called; to be called all the time while this rank waits.

        Raises SilentRank if it has been waiting, without a call, for longer than rank 0 may be
        silent. What this rank computed meanwhile, or was stopped itself, as when a whole job is
        suspended, does not count.
        """
        now = time.monotonic()
        if was_stopped(self._polled, now):
            self._heard = now
        self._polled = now
        if self._comm.Iprobe(0, _CALL):
            memory = np.zeros(1, np.uint8)
            self._comm.Recv(memory, 0, _CALL)
            self._comm.Send(memory, 0, _ANSWER)
            self._heard = now
            return
        silence_s = max(self._timeout_s, self.least_s) + GRACE_S
        silence_s += _AFTER_ANOTHER_S * (self._comm.Get_rank() - 1)
        if now - self._heard > silence_s:
            raise SilentRank(
                f"rank 0 of {self._comm.Get_size()} has not been heard for {silence_s:g} s "
                "(--step-timeout): stopped or out of reach"
            )


def was_stopped(looked: float, now: float) -> bool:
    """Whether a thread that looks at the clock all the time has not run in between."""
    return now - looked > 2 * _LONGEST_PAUSE_S


def _check_threads(mpi: Any) -> None:
    """Raise UserError if the MPI library cannot be called from the threads that look at the clock.

    mpi: the module mpi4py.MPI.
    """
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        library = " ".join(mpi.Get_library_version().split("\n")[0].split())
        raise UserError(
            f"--step-timeout needs an MPI library for several threads (MPI_THREAD_MULTIPLE), which "
            f"{library} is not as it runs here: leave the option out, or set the library up for it"
        )
