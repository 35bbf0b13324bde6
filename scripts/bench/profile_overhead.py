#!/usr/bin/env python3
"""Measures what the profile costs: the time of decode steps with it and without.

Method: one process, one model; steps with and without the profile alternate in pairs, so that what
else the machine does meets both. The cost is told of the medians and of the quickest steps, which a
busy machine disturbs least.

Limits: one sequence. A step with the profile includes what the rank keeps of it for the trace.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Annotated, Any

import numpy as np
import typer

from benchkit.child import child
from benchkit.command import check_json_path, main, team_sizes
from benchkit.contestants import ModelChoice
from benchkit.report import describe, machine, table, write_json
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.launcher.loading import StepSizes, open_engine

_CONTEXT = 128
_WARM_UPS = 10
_SLOTS = 1 << 16


class Watched:
    """A model in a process of its own, with a stage that can be profiled."""

    def __init__(self, choice: ModelChoice, threads: int, cache_dir: Path | None) -> None:
        model = choice.open()
        sizes = StepSizes(tokens=_CONTEXT, rows=1, slots=1)
        opened = open_engine(model, threads, sizes, Cache.open(cache_dir), show=True)
        self._stack = ExitStack()
        self._engine, loaded = self._stack.enter_context(opened)
        self._stage = loaded.stage
        self._engine.prefill(0, np.arange(_CONTEXT, dtype=np.int64))

    def pairs(self, count: int) -> dict[str, Any]:
        """Times of decode steps without and with the profile, ns, and what the last one says."""
        for _ in range(_WARM_UPS):
            self._step()
        off, on = [], []
        for _ in range(count):
            off.append(self._step())
            profile = self._stage.profile(_SLOTS)
            begin = perf_counter_ns()
            self._step()
            profile.keep_step()
            on.append(perf_counter_ns() - begin)
            self._stage.stop_profile()
        times = profile.read()
        gap = times.between_regions / len(times.regions)
        return {"off": off, "on": on, "regions": len(times.regions), "gap_ns": gap}

    def _step(self) -> int:
        begin = perf_counter_ns()
        self._engine.decode(0, 1, _CONTEXT)
        return perf_counter_ns() - begin


def profile_overhead(
    spec: Annotated[str, typer.Option(help="A shipped spec or JSON file.")],
    local_model: Annotated[Path | None, typer.Option(help="Weights for the spec.")] = None,
    variant: Annotated[str | None, typer.Option(help="Number format.")] = None,
    threads: Annotated[str | None, typer.Option(help="Team sizes, such as 1,2.")] = None,
    pairs: Annotated[int, typer.Option(min=5, help="Steps of each kind.")] = 100,
    cache_dir: Annotated[Path | None, typer.Option(help="Compiled objects.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Measures decode steps with and without the profile."""
    check_json_path(json)
    choice = ModelChoice(spec, local_model, variant, 2 * _CONTEXT)
    facts = machine()
    print(describe(facts))
    rows, results = [], []
    for team in team_sizes(threads):
        with child(spec, Watched, choice, team, cache_dir) as process:
            found = process.call("pairs", pairs)
        results.append({"threads": team, **found})
        figures = []
        for of in (median, min):
            off, on = of(found["off"]), of(found["on"])
            figures += [f"{off / 1e6:.3f}", f"{on / 1e6:.3f}", f"{100 * (on / off - 1):+.2f} %"]
        rows.append((str(team), *figures, str(found["regions"]), f"{found['gap_ns']:.0f}"))
    head = ("threads", "median ms", "with", "cost", "least ms", "with", "cost", "regions", "gap ns")
    print(table(head, rows))
    write_json(json, {"machine": facts, "method": __doc__, "results": results})


if __name__ == "__main__":
    main(profile_overhead)
