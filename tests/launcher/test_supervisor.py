"""A rank and the process that looks after it, without MPI: only the environment says it is one."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.jobs import TIMEOUT_S, eventually, gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are supervised on Linux")

RANK = {"PMI_RANK": "2", "PMI_SIZE": "4"}
SAYS_WHO = """
import os, signal, subprocess, sys, time
from buddy_pipeline.launcher.supervisor import supervise
supervise()
def say(*what):
    print(*what, flush=True)
say(os.getpid())
"""
SLEEPS = SAYS_WHO + "time.sleep(60)"
COUNTS = """
counted = []
signal.signal(signal.SIGUSR1, lambda number, frame: counted.append(number))
signal.signal(signal.SIGTERM, lambda number, frame: (say(len(counted)), sys.exit(7)))
say("ready")
while True: time.sleep(0.01)
"""


@contextmanager
def rank(program: str, environ: dict[str, str] = RANK) -> Iterator[tuple[subprocess.Popen, int]]:
    """A supervisor, and the number of the process that works for it."""
    job = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    worker = 0
    try:
        assert job.stdout is not None
        worker = int(job.stdout.readline())
        yield job, worker
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker or job.pid, signal.SIGKILL)
        job.kill()
        job.communicate()


def ended(job: subprocess.Popen, input: str | None = None) -> tuple[int, str, str]:
    stdout, stderr = job.communicate(input, timeout=TIMEOUT_S)
    return job.returncode, stdout, stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_rank_that_is_killed_is_named(number: signal.Signals) -> None:
    with rank(SLEEPS) as (job, worker):
        os.kill(worker, number)
        code, _, stderr = ended(job)
    assert code == -number
    place = f"buddy-pipeline: error: rank 2 of 4 on {socket.gethostname()}: process {worker}"
    assert stderr.startswith(f"{place} was killed by {number.name}")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGPIPE])
def test_a_rank_that_is_ended_on_purpose_is_not(number: signal.Signals) -> None:
    with rank(SLEEPS.replace("supervise()\n", f"supervise()\nsignal.signal({number}, 0)\n")) as (
        job,
        worker,
    ):
        os.kill(worker, number)
        assert ended(job) == (-number, "", "")


def test_nor_one_that_its_launcher_kills_for_not_ending() -> None:
    """As Open MPI does: first it asks, then it kills."""
    deaf = SAYS_WHO + "signal.signal(signal.SIGTERM, signal.SIG_IGN); say(1); time.sleep(60)"
    with rank(deaf) as (job, worker):
        assert job.stdout is not None and job.stdout.readline()
        os.killpg(job.pid, signal.SIGTERM)
        os.kill(worker, signal.SIGKILL)
        assert ended(job) == (-signal.SIGKILL, "", "")


def test_an_exit_code_is_passed_on() -> None:
    with rank(SAYS_WHO + "sys.exit(3)") as (job, worker):
        assert ended(job) == (3, "", "")
        assert worker != job.pid


def test_input_and_output_are_the_ranks() -> None:
    program = SAYS_WHO + "say(sys.stdin.read().upper()); print('well', file=sys.stderr)"
    with rank(program) as (job, _):
        assert ended(job, "hello") == (0, "HELLO\n", "well\n")


@pytest.mark.parametrize("whole_group", [False, True])
def test_signals_reach_the_rank_once(whole_group: bool) -> None:
    with rank(SAYS_WHO + COUNTS) as (job, _):
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        send = os.killpg if whole_group else os.kill
        send(job.pid, signal.SIGUSR1)
        send(job.pid, signal.SIGTERM)
        assert ended(job) == (7, "1\n", "")


def test_a_rank_ends_with_its_supervisor() -> None:
    with rank(SLEEPS) as (job, worker):
        job.kill()
        assert eventually(lambda: gone(worker))


def test_a_rank_ends_with_its_launcher() -> None:
    launcher = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1"; true', sys.executable, SLEEPS],
        env={**os.environ, **RANK},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None and launcher.stderr is not None
    with launcher.stdout, launcher.stderr:
        worker = psutil.Process(int(launcher.stdout.readline()))
        supervisor = worker.ppid()
        assert psutil.Process(supervisor).ppid() == launcher.pid
        launcher.kill()
        launcher.wait()
        assert eventually(lambda: gone(worker.pid) and gone(supervisor))
        assert launcher.stderr.read() == ""


def test_what_a_rank_has_started_ends_with_it() -> None:
    program = SAYS_WHO + "say(subprocess.Popen(['sleep', '60']).pid); time.sleep(60)"
    with rank(program) as (job, worker):
        assert job.stdout is not None
        started = int(job.stdout.readline())
        os.kill(worker, signal.SIGKILL)
        ended(job)
        assert eventually(lambda: gone(started))


@pytest.mark.parametrize("environ", [{}, {"PMI_RANK": "0", "PMI_SIZE": "1"}, {"PMI_RANK": "x"}])
def test_who_is_no_rank_among_several_works_itself(environ: dict[str, str]) -> None:
    with rank(SAYS_WHO, environ) as (job, worker):
        assert worker == job.pid


def test_a_supervisor_is_small() -> None:
    with rank(SAYS_WHO + "import numpy; say(numpy.pi); time.sleep(60)") as (job, worker):
        assert job.stdout is not None and job.stdout.readline()
        own, its = (psutil.Process(pid).memory_full_info().uss for pid in (job.pid, worker))
        assert own < 8_000_000 < its
