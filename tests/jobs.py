"""Starts programs, each in a process group of its own, and always ends them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 10.0
"""A job that fails must have ended by then."""


@dataclass(frozen=True)
class Ended:
    """What is left of a job."""

    code: int
    stdout: str
    stderr: str


def start(*words: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command, with `env` added to its environment; give the job to `end` in the end."""
    return subprocess.Popen(
        [str(word) for word in words],
        env={**environment(), **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(job: subprocess.Popen[str], timeout: float) -> Ended:
    """What a job leaves when it ends by itself; the test fails if it outlives `timeout` seconds."""
    try:
        stdout, stderr = job.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{job.args} did not end within {timeout} s")
    finally:
        end(job)
    return Ended(job.returncode, stdout, stderr)


def end(job: subprocess.Popen[str]) -> None:
    """Kill a job and all that it has started, if it still runs."""
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    for stream in (job.stdout, job.stderr):
        if stream is not None:
            stream.close()


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
