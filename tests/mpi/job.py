"""Starts a program on several ranks with the mpirun beside this Python, and always ends it."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests import jobs
from tests.jobs import ROOT, TIMEOUT_S, Ended

MPIRUN = Path(sys.executable).parent / "mpirun"

needs_mpi = pytest.mark.skipif(
    not MPIRUN.exists() or find_spec("mpi4py") is None,
    reason="needs mpi4py and an mpirun beside this Python: pip install 'buddy-pipeline[mpi]'",
)


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
        ended = jobs.finish(job, timeout)
    finally:
        jobs.end(job)
    return replace(ended, stdout=seen + ended.stdout)


def start(ranks: int, script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start what `mpirun` runs; give the job to `tests.jobs.end` in the end."""
    program = (sys.executable, ROOT / "tests/mpi" / script)
    return jobs.start(MPIRUN, "-n", ranks, *program, *arguments)


def ranks_of(job: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the ranks that have been started so far."""
    found = psutil.Process(job.pid).children(recursive=True)
    return [process for process in found if sys.executable in process.cmdline()]
