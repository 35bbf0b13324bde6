#!/usr/bin/env python3
"""Measures what the profile costs: the time of decode steps with it and without.

Method: one process, one model, one table: the profile is switched on for one step of each pair and
off for the other, which of them comes first is drawn. The cost is the median of the differences
within the pairs, over the median step without, and beside it the 95 % interval of that median (from
the order of the differences, so it assumes nothing about how they are spread). Wall time shows what
a user waits, CPU time of the process is not disturbed by whatever takes the cores meanwhile.

Limits: one sequence. A step with the profile includes what the rank keeps of it for the trace.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns, process_time_ns
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
_CLOCKS = {"wall": perf_counter_ns, "cpu": process_time_ns}
_NORMAL_95 = 1.96
"""Standard deviations to either side that hold 95 % of a normal distribution."""


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
        """Times of decode steps without and with the profile by clock, ns [count] each in order of
        the pairs, and what the profile says."""
        profile = self._stage.profile(_SLOTS)
        for _ in range(_WARM_UPS):
            self._step(profile.keep_step)
        steps: dict[bool, dict[str, list[int]]]
        steps = {on: {clock: [] for clock in _CLOCKS} for on in (False, True)}
        chance = random.Random(count)
        for _ in range(count):
            for on in chance.sample((False, True), 2):
                if on:
                    self._stage.resume_profile()
                else:
                    self._stage.stop_profile()
                times = self._step(profile.keep_step if on else None)
                for clock, time in times.items():
                    steps[on][clock].append(time)
        said = profile.read()
        gap = said.between_regions / said.steps / len(said.regions)
        return {
            "off": steps[False],
            "on": steps[True],
            "regions": len(said.regions),
            "gap_ns": gap,
        }

    def _step(self, keep: Callable[[], None] | None) -> dict[str, int]:
        begin = {clock: now() for clock, now in _CLOCKS.items()}
        self._engine.decode(0, 1, _CONTEXT)
        if keep is not None:
            keep()
        return {clock: now() - begin[clock] for clock, now in _CLOCKS.items()}


@dataclass(frozen=True)
class Cost:
    """The median difference within pairs and the ends of its 95 % interval, as parts of the median
    step without the profile."""

    step_ns: float
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, off: list[int], on: list[int]) -> Cost:
        """From the times of pairs, ns."""
        step = median(off)
        differences = sorted(b - a for a, b in zip(off, on, strict=True))
        half = len(differences) / 2
        reach = math.ceil(_NORMAL_95 * math.sqrt(len(differences)) / 2)
        low = differences[max(0, math.floor(half) - reach)]
        high = differences[min(len(differences) - 1, math.ceil(half) + reach)]
        return cls(step, median(differences) / step, low / step, high / step)

    def __str__(self) -> str:
        share, low, high = (f"{100 * part:+.2f}" for part in (self.share, self.low, self.high))
        return f"{share} % ({low} to {high})"


def profile_overhead(
    spec: Annotated[str, typer.Option(help="A shipped spec or JSON file.")],
    local_model: Annotated[Path | None, typer.Option(help="Weights for the spec.")] = None,
    variant: Annotated[str | None, typer.Option(help="Number format.")] = None,
    threads: Annotated[str | None, typer.Option(help="Team sizes, such as 1,2.")] = None,
    pairs: Annotated[int, typer.Option(min=5, help="Steps of each kind.")] = 1000,
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
        wall, cpu = (Cost.of(found["off"][clock], found["on"][clock]) for clock in ("wall", "cpu"))
        step = f"{wall.step_ns / 1e6:.3f}"
        rows.append(
            (str(team), step, str(wall), str(cpu), str(found["regions"]), f"{found['gap_ns']:.0f}")
        )
    head = ("threads", "step ms", "cost, wall time", "cost, CPU time", "regions", "gap ns")
    print(table(head, rows))
    write_json(json, {"machine": facts, "method": __doc__, "results": results})


if __name__ == "__main__":
    main(profile_overhead)
