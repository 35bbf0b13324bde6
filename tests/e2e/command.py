"""Runs the installed command line as a user does, alone or under mpirun, and always ends it."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import jobs
from tests.jobs import Ended
from tests.mpi.job import MPIRUN

COMMAND = Path(sys.executable).parent / "buddy-pipeline"
TIMEOUT_S = 120.0
"""Includes a cold compilation on a machine that is busy with other things."""


def buddy_pipeline(
    *arguments: object,
    ranks: int = 1,
    cache: Path | None = None,
    env: Mapping[str, str] | None = None,
    command: Sequence[object] = (COMMAND,),
) -> Ended:
    """Run `buddy-pipeline ARGUMENTS`, under mpirun if there is more than one rank.

    cache: its --cache-dir, for commands that have one. env: added to the environment. command:
    what to start in place of the console script.
    """
    job = start(*arguments, ranks=ranks, cache=cache, env=env, command=command)
    return jobs.finish(job, TIMEOUT_S)


def start(
    *arguments: object,
    ranks: int = 1,
    cache: Path | None = None,
    env: Mapping[str, str] | None = None,
    command: Sequence[object] = (COMMAND,),
) -> subprocess.Popen[str]:
    """Start what `buddy_pipeline` runs; give the job to `tests.jobs.end` in the end."""
    launcher = [MPIRUN, "-n", ranks] if ranks > 1 else []
    where = ["--cache-dir", cache] if cache is not None else []
    return jobs.start(*launcher, *command, *arguments, *where, env=env)


def answer(json_path: Path, *arguments: object, ranks: int = 1, **how: Any) -> dict[str, Any]:
    """The JSON of a run that succeeds."""
    ended = buddy_pipeline(*arguments, "--json", json_path, ranks=ranks, **how)
    assert ended.code == 0, ended.stderr
    result: dict[str, Any] = json.loads(json_path.read_text(encoding="utf-8"))
    return result


def refusal(ended: Ended) -> str:
    """The one line of a run that ended for something the user can mend."""
    assert ended.code == 2, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if not is_progress(line)]
    assert len(lines) == 1, ended.stderr
    assert lines[0].startswith("buddy-pipeline: error: ")
    return lines[0].removeprefix("buddy-pipeline: error: ")


def is_progress(line: str) -> bool:
    """Whether a line of stderr only says how far compilation is."""
    return line.startswith(("exported and planned ", "compiling"))
