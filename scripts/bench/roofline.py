#!/usr/bin/env python3
"""Measures the machine's two limits, read bandwidth and multiply-add peak, for 1 and all threads.

Method: our own compiled loops (benchkit/roofline_kernels.py), run by the product's driver with one
team; the best of several repetitions. Beside them, for plausibility, the same in C (if gcc is
there) and NumPy's sum and matrix product.

Limits: on a shared machine the best of a few runs may still be low, and the figures hold for this
moment; quote ratios to limits measured in the same run.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchkit.child import child, run_in_child
from benchkit.command import check_json_path, main, team_sizes
from benchkit.limits import LimitMeter, Limits, Objects, compile_loops
from benchkit.reference_loops import c_loops, numpy_flops, numpy_read
from benchkit.report import describe, machine, table, write_json
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.ranks.affinity import available_cores, prepare_threads
from buddy_pipeline.ranks.memory_blocks import arena
from buddy_pipeline.ranks.world import join_world

#: A C loop this much faster than ours, or slower, means that one of the two does not measure what
#: it says.
_PLAUSIBLE = 1.25


class Ours:
    """A process with a team of threads and our loops."""

    def __init__(self, objects: Objects, threads: int, megabytes: int) -> None:
        prepare_threads(join_world({}), threads)
        self._meter = LimitMeter(objects, threads, megabytes)

    def measure(self, repetitions: int) -> Limits:
        return self._meter.measure(repetitions)


class Others:
    """A process for NumPy and C: where our team runs, its runtime has bound the main thread to a
    core, and threads made later would all stay on that."""

    def __init__(self, threads: int, megabytes: int) -> None:
        self._threads = threads
        self._data = arena(megabytes << 20).view(np.float32)
        self._data[:] = 1.0
        self._c = c_loops(host_target().vector_bits)

    def measure(self, repetitions: int) -> dict[str, Any]:
        """Bytes/s and FLOP/s; "c" is None without gcc."""
        c = None
        if self._c is not None:
            c = {
                "read_bytes_per_s": self._c.read(self._data, self._threads, repetitions),
                "f32_flops_per_s": self._c.flops(self._threads, repetitions),
            }
        return {
            "c": c,
            "numpy": {
                "read_bytes_per_s_one_thread": numpy_read(self._data, repetitions),
                "f32_flops_per_s_all_threads": numpy_flops(repetitions),
            },
        }


def measure(objects: Objects, threads: int, megabytes: int, repetitions: int) -> dict[str, Any]:
    """The limits of one team by who measured them."""
    with (
        child(f"{threads} threads", Ours, objects, threads, megabytes) as ours,
        child("the other loops", Others, threads, megabytes) as others,
    ):
        # In turns, so that a disturbance of one does not decide the comparison.
        before = ours.call("measure", repetitions)
        other = others.call("measure", repetitions)
        after = ours.call("measure", repetitions)
    return {"ours": asdict(before.best(after)), **other}


def implausible(measured: dict[str, Any]) -> list[str]:
    """What does not fit together in one `measure`, a line each."""
    lines = []
    ours, c = measured["ours"], measured["c"]
    for key, name in (("read_bytes_per_s", "read bandwidth"), ("f32_flops_per_s", "f32 peak")):
        if c is not None and not 1 / _PLAUSIBLE <= ours[key] / c[key] <= _PLAUSIBLE:
            lines.append(
                f"{ours['threads']} threads: {name} is {ours[key] / 1e9:.1f} G/s with our loop and"
                f" {c[key] / 1e9:.1f} G/s in C"
            )
    read = measured["numpy"]["read_bytes_per_s_one_thread"]
    if read > _PLAUSIBLE * ours["read_bytes_per_s"]:
        lines.append(f"{ours['threads']} threads: NumPy reads faster, {read / 1e9:.1f} GB/s")
    return lines


def roofline(
    threads: Annotated[
        str | None, typer.Option(help="Team sizes, such as 1,2; default: 1 and all cores.")
    ] = None,
    megabytes: Annotated[
        int, typer.Option(min=64, help="Size of what is read: far above the last cache.")
    ] = 1024,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each loop; the best counts.")] = 20,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Measures read bandwidth and multiply-add peak with our own compiled loops."""
    check_json_path(json)
    teams = team_sizes(threads)
    facts = machine()
    print(describe(facts))
    objects = run_in_child("the compiler", compile_loops, host_target())
    results, rows, doubts = [], [], []
    for team in teams:
        measured = measure(objects, team, megabytes, repetitions)
        results.append(measured)
        rows += _rows(team, measured)
        doubts += implausible(measured)
    print(table(("threads, by", "read GB/s", "f32 GFLOP/s", "bf16 GFLOP/s"), rows))
    for line in doubts:
        print(f"implausible, measure again on an idle machine: {line}")
    write_json(json, {"machine": facts, "megabytes": megabytes, "results": results})


def _rows(team: int, measured: dict[str, Any]) -> list[tuple[str, ...]]:
    def giga(value: float | None) -> str:
        return "-" if value is None else f"{value / 1e9:.1f}"

    limits = Limits(**measured["ours"])
    rows: list[tuple[str, ...]] = [
        (
            f"{team}, our loops",
            giga(limits.read_bytes_per_s),
            giga(limits.f32_flops_per_s),
            giga(limits.bf16_flops_per_s),
        )
    ]
    c, numpy = measured["c"], measured["numpy"]
    if c is not None:
        rows.append((f"{team}, C", giga(c["read_bytes_per_s"]), giga(c["f32_flops_per_s"]), "-"))
    if team == 1:
        rows.append(("1, NumPy sum", giga(numpy["read_bytes_per_s_one_thread"]), "-", "-"))
    if team == len(available_cores()):
        flops = giga(numpy["f32_flops_per_s_all_threads"])
        rows.append((f"{team}, NumPy product", "-", flops, "-"))
    return rows


if __name__ == "__main__":
    main(roofline)
