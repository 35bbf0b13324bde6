#!/usr/bin/env python3
"""Measures how long a user waits: a cold compilation, and a warm start up to the first token.

Method: processes of the installed command are timed from outside, so that the interpreter's own
start and all imports count. Cold: `buddy-pipeline compile` of one rank into an empty cache folder,
from start to end of the process. Warm: `buddy-pipeline --prompt …` with a filled cache and the
model's file in the page cache, from the start of the process (or of mpirun) to the first byte of
text on its standard output. Worlds alternate over the rounds; the median counts.

Limits: the files of Python and of the packages are in the page cache too, and our modules are
compiled, as they are after the first start ever. The time to the first
token holds the prompt's prefill (a short prompt). Whatever else runs on the machine counts: CPU
seconds, of the compilation and all its children, say how much of the time was that.
"""

from __future__ import annotations

import functools
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchkit.command import check_json_path, main, user_environment, whole_numbers
from benchkit.report import describe, machine, summary, table, write_json
from buddy_pipeline.partition.errors import UserError

_BIN = Path(sys.executable).parent
_PROMPT = "Why is the sky blue?"
COLD_TARGET_S = 30.0
WARM_TARGET_S = 3.0


def cold(spec: str, rank: int, world: int) -> dict[str, Any]:
    """Compiles one rank into a cache that is empty before; seconds and what was built."""
    with tempfile.TemporaryDirectory() as cache:
        words = ["compile", "--spec", spec, "--rank", rank, "--world", world, "--cache-dir", cache]
        start, cpu_start = time.perf_counter(), _cpu_of_children()
        done = subprocess.run(
            _command(1, *words), capture_output=True, text=True, env=_environment()
        )
        seconds, cpu = time.perf_counter() - start, _cpu_of_children() - cpu_start
    if done.returncode != 0:
        raise UserError(f"compiling {spec} failed: {done.stderr.strip()}")
    built = re.search(r"(\d+) built", done.stdout)
    assert built is not None, done.stdout
    return {
        "rank": rank,
        "world": world,
        "built": int(built[1]),
        "seconds": seconds,
        "cpu_seconds": cpu,
    }


def warm(spec: str, world: int, cache: Path) -> float:
    """Seconds from the start of the command to the first byte of text."""
    words = ["--spec", spec, "--prompt", _PROMPT, "--max-tokens", 1, "--no-stats"]
    start = time.perf_counter()
    with subprocess.Popen(
        _command(world, *words, "--cache-dir", cache),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
    ) as job:
        assert job.stdout is not None and job.stderr is not None
        first = job.stdout.read(1)
        seconds = time.perf_counter() - start
        complaint = job.stderr.read().decode().strip()
    if job.returncode != 0 or not first:
        raise UserError(f"running {spec} on {world} ranks failed: {complaint}")
    return seconds


@functools.cache
def _environment() -> dict[str, str]:
    return user_environment()


def _cpu_of_children() -> float:
    """CPU seconds of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _command(world: int, *words: object) -> list[str]:
    launcher = [str(_BIN / "mpirun"), "-n", str(world)] if world > 1 else []
    return [*launcher, str(_BIN / "buddy-pipeline"), *map(str, words)]


def startup(
    spec: Annotated[str, typer.Option(help="Spec to start.")] = "smollm2-135m",
    worlds: Annotated[str, typer.Option(help="Ranks of the starts.")] = "1,4",
    rounds: Annotated[int, typer.Option(help="Warm starts a world.", min=1)] = 5,
    json: Annotated[Path | None, typer.Option(help="File for the figures as JSON.")] = None,
) -> None:
    """Prints the seconds of cold compilations and of warm starts."""
    check_json_path(json)
    sizes = whole_numbers("--worlds", worlds)
    facts = machine()
    print(describe(facts))
    colds = [cold(spec, 0, world) for world in sizes]
    print(f"\ncold compilation of one rank (target: below {COLD_TARGET_S:.0f} s)")
    rows: list[tuple[str, ...]] = [
        (
            f"rank {c['rank']} of {c['world']}",
            str(c["built"]),
            f"{c['seconds']:.2f}",
            f"{c['cpu_seconds']:.2f}",
        )
        for c in colds
    ]
    print(table(("rank", "objects", "s", "CPU s"), rows))

    samples: dict[int, list[float]] = {world: [] for world in sizes}
    with tempfile.TemporaryDirectory() as folder:
        for world in sizes:
            warm(spec, world, Path(folder))  # fills the cache
        for _ in range(rounds):
            for world, seconds in samples.items():
                seconds.append(warm(spec, world, Path(folder)))
    warms = [{"world": world, "seconds": summary(seconds)} for world, seconds in samples.items()]
    print(f"\nwarm start to the first token (target: below {WARM_TARGET_S:.0f} s)")
    rows = [
        (str(w["world"]), *(f"{w['seconds'][k]:.2f}" for k in ("median", "min", "max")))
        for w in warms
    ]
    print(table(("ranks", "s", "shortest", "longest"), rows))
    results = {"spec": spec, "cold": colds, "warm": warms}
    write_json(json, {"machine": facts, "method": __doc__, **results})


if __name__ == "__main__":
    main(startup)
