"""Starts a program on several ranks with the mpirun beside this Python, and always ends it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
MPIRUN = Path(sys.executable).parent / "mpirun"
TIMEOUT_S = 10.0
"""A job that fails must have ended by then."""

needs_mpi = pytest.mark.skipif(
    not MPIRUN.exists() or find_spec("mpi4py") is None,
    reason="needs mpi4py and an mpirun beside this Python: pip install 'buddy-pipeline[mpi]'",
)


@dataclass(frozen=True)
class Ended:
    """What is left of a job."""

    code: int
    stdout: str
    stderr: str


def mpirun(
    ranks: int,
    script: str,
    *arguments: object,
    interrupt: tuple[str, int] | None = None,
    timeout: float = TIMEOUT_S,
) -> Ended:
    """Run `tests/mpi/SCRIPT` on `ranks` ranks; the test fails if the job outlives `timeout`.

    interrupt: (text, signal number): once the text is on stdout, send the signal to mpirun; the
    timeout then counts from there.
    """
    job = start(ranks, script, *arguments)
    try:
        seen = ""
        if interrupt is not None:
            text, number = interrupt
            assert job.stdout is not None
            while text not in seen:
                line = job.stdout.readline()
                assert line, f"the job ended before it printed {text!r}"
                seen += line
            job.send_signal(number)
        stdout, stderr = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the job did not end within {timeout} s")
    finally:
        end(job)
    return Ended(job.returncode, seen + stdout, stderr)


def start(ranks: int, script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start what `mpirun` runs; give the job to `end` in the end."""
    return subprocess.Popen(
        [MPIRUN, "-n", str(ranks), sys.executable, ROOT / "tests/mpi" / script]
        + [str(argument) for argument in arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(job: subprocess.Popen[str]) -> None:
    """Kill a job that still runs."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def ranks_of(job: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the ranks that have been started so far."""
    found = psutil.Process(job.pid).children(recursive=True)
    return [process for process in found if sys.executable in process.cmdline()]


def environment() -> dict[str, str]:
    """This process's environment, with `tests` importable too."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def gone(pid: int) -> bool:
    """True if there is no such process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def eventually(condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> bool:
    """Wait up to `seconds` for a condition."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
