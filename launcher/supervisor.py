"""Looks after one rank from a process of its own, so that a rank that is killed is named.

Whoever dies by SIGKILL (the system's answer to a lack of memory) says nothing, and the launcher of
the ranks knows no more than a process number. So the process that the launcher started forks
before anything is imported: the child becomes the rank, the parent waits for it.

The parent keeps the launcher's connection open: without it the launcher would see the rank's end at
once and kill the parent before it can speak. The child has a process group of its own, and signals
to the parent's are passed on: each process gets a signal once, from whoever sends it to how many.
Linux kills the child when its parent ends, however that ends; and the parent ends soon after the
process that started it, as when a host kills its part of the launcher, since nobody else is left
who would end this rank.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.mpi_launcher import Launcher, detect_launcher

_ENDING = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}
"""Signals by which people and launchers end a job on purpose."""
_PASSED_ON = {*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT}
_SILENT = {*_ENDING, signal.SIGPIPE}
"""Deaths that nobody needs to hear of; SIGPIPE's is that of an output nobody reads."""
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LOOKS_S = 1.0
"""Time between two looks for whoever started us. PDEATHSIG would not do: it also comes when only
the thread that started us ends."""


def supervise() -> None:
    """Split this process, if it is one of several ranks: returns in the one that is to work.

    The one that stays behind ends as the other did, by the same code or signal: MPICH's launcher
    ends a job at once for a signal, but for a code only if the rank had joined the others. Call
    before there are threads. On Linux only: elsewhere nothing ties the life of a child to its
    parent's.
    """
    try:
        launcher = detect_launcher()
    except UserError:  # whoever joins the ranks will say it
        return
    if launcher is None or launcher.size == 1 or sys.platform != "linux":
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, nobody learns of a child's end
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    starter, parent = os.getppid(), os.getpid()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    with suppress(OSError):  # the child, which does the same, may have been quicker, or be dead
        os.setpgid(child, child)
    passed, status = _watch(child, starter)
    if os.WIFSIGNALED(status):
        killer = os.WTERMSIG(status)
        if killer not in _SILENT and not passed & _ENDING:
            _report(child, killer, launcher)
        _die_by(killer)
    os._exit(os.WEXITSTATUS(status))


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends; at once if it already has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(child: int, starter: int) -> tuple[set[int], int]:
    """Wait for the child, passing signals on; these signals, and the status that waitpid gave.

    A child whose supervisor has lost its starter is killed, and SIGTERM counts as passed on.
    """
    passed: set[int] = set()
    while True:
        received = signal.sigtimedwait({*_PASSED_ON, signal.SIGCHLD}, _LOOKS_S)
        if received is None:
            if os.getppid() != starter:
                passed.add(signal.SIGTERM)
                break
        elif received.si_signo != signal.SIGCHLD:
            passed.add(received.si_signo)
            _signal_group(child, received.si_signo)
        # Not reaped yet, so that its group's number cannot belong to another.
        elif os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
    _signal_group(child, signal.SIGKILL)  # what it has started, such as compilers
    return passed, os.waitpid(child, 0)[1]


def _signal_group(child: int, number: int) -> None:
    with suppress(ProcessLookupError):  # dead before it had a group
        os.killpg(child, number)


def _die_by(number: int) -> None:
    """End this process by a signal, without a core file: that of the rank is the one to look at."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def _report(child: int, killer: int, launcher: Launcher) -> None:
    """One line about the rank that was killed."""
    from socket import gethostname

    from buddy_pipeline.ranks.error_lines import print_error

    world = "" if launcher.size is None else f" of {launcher.size}"
    reason = " (by hand, or by the system for lack of memory)" * (killer == signal.SIGKILL)
    print_error(
        f"rank {launcher.rank}{world} on {gethostname()}: process {child} was killed by "
        f"{signal.Signals(killer).name}{reason}"
    )
