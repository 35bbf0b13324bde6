#!/usr/bin/env python3
"""Compile times of a published shape: whole graph against partitions, cold, stage by stage.

    scripts/bench/compile.py [--shape NAME] [--jobs 2] [--only ROW,ROW] [--json FILE]

In `whole-graph` every node has its own code, as without templates; `shared-kernels` is one module
whose parts call the same kernels; `no-templates` has an object for each partition, and those too.
Each row starts from an empty cache. No weights are made or read. Rows up to `warm` call the stages
one after the other: `compile` has the start of its processes in it. Rows from `build` on are the
command `buddy-pipeline build` as a user types it, timed from outside; it compiles while it still
imports, so that its `compile` is what is left then. `build-warm` is the same command once more, and
`build-rank-of-4` is for rank 1 of a world of 4. CPU seconds, of all processes, say how much of the
time was work where other things run on the machine.
"""

from __future__ import annotations

import json as json_text
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchkit import command, report
from benchkit.naive_compile import compile_naively
from benchkit.published import published_config
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.granularity import Granularity, Sharing
from buddy_pipeline.compile.service import CutGraph, ensure_objects, ensure_plan
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.compile.variant import VARIANTS
from buddy_pipeline.launcher.nearest import nearest
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import block_role, layer_ranges

#: Tokens of the graph that is compiled without us: its shapes are fixed, ours are not.
_NAIVE_TOKENS = 128


@dataclass(frozen=True)
class Row:
    """Seconds of one way to compile the model."""

    name: str
    export: float
    imports: float
    verify: float
    compile: float
    total: float
    """With starting the compiler processes."""
    cpu: float
    """CPU seconds of the child processes."""
    objects: int
    bytes: int


def main(
    name: Annotated[str, typer.Option("--shape", help="A published shape.")] = (
        "deepseek-r1-distill-qwen-1.5b"
    ),
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Compilers at a time.")] = 2,
    layers: Annotated[int | None, typer.Option(help="Layers, in place of the shape's.")] = None,
    only: Annotated[str | None, typer.Option(help="Rows to measure, by name.")] = None,
    json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
) -> None:
    """Measures and prints a table."""
    command.check_json_path(json)
    config = dict(published_config(name))
    if layers is not None:
        config["num_hidden_layers"] = layers
    rows = _rows(config, jobs)
    wanted = list(rows) if only is None else only.split(",")
    for row in wanted:
        if row not in rows:
            raise UserError(f"--only {row!r} is no row: {nearest(row, rows)}")
    facts = report.machine()
    print(f"{name}, {config['num_hidden_layers']} layers, f32, -j {jobs}")
    print(report.describe(facts))
    measured = []
    for row in wanted:
        measured.append(rows[row]())
        print(report.table(_HEAD, [_cells(r) for r in measured[-1:]]), flush=True)
    print()
    print(report.table(_HEAD, [_cells(row) for row in measured]))
    data = {"shape": name, "jobs": jobs, "machine": facts, "rows": [asdict(r) for r in measured]}
    report.write_json(json, data)


_HEAD = (
    *("row", "export s", "import s", "verify s", "compile s", "total s", "CPU s"),
    *("objects", "bytes"),
)


def _cells(row: Row) -> tuple[str, ...]:
    times = (row.export, row.imports, row.verify, row.compile, row.total, row.cpu)
    return (row.name, *(f"{t:.2f}" for t in times), str(row.objects), f"{row.bytes:,}")


def _rows(config: dict[str, Any], jobs: int) -> dict[str, Callable[[], Row]]:
    """What can be measured, by name."""

    def ours(name: str, granularity: Granularity, world: int = 1) -> Callable[[], Row]:
        return lambda: _measure(name, config, granularity, jobs, world)

    return {
        "naive": lambda: _measure_naive(config),
        "whole-graph": ours("whole-graph", Granularity("coarse", Sharing.WHOLE_GRAPH)),
        "shared-kernels": ours("shared-kernels", Granularity("coarse", Sharing.KERNELS)),
        "no-templates": ours("no-templates", Granularity("coarse", Sharing.NOTHING)),
        "coarse": ours("coarse", Granularity("coarse")),
        "block": ours("block", Granularity("block")),
        "fine": ours("fine", Granularity("fine")),
        "rank-of-4": ours("rank-of-4", Granularity("coarse"), world=4),
        "warm": lambda: _measure_warm(config, jobs),
        "build": lambda: _measure_command("build", config, jobs),
        "build-warm": lambda: _measure_command("build-warm", config, jobs, warm=True),
        "build-rank-of-4": lambda: _measure_command(
            "build-rank-of-4", config, jobs, "--rank", "1", "--world", "4"
        ),
    }


def _measure(
    name: str, config: dict[str, Any], granularity: Granularity, jobs: int, world: int
) -> Row:
    """From nothing to the objects of rank 1 (of a world of 1: rank 0)."""
    with _empty_cache() as cache:
        return _stages(name, config, granularity, jobs, world, cache)


def _measure_warm(config: dict[str, Any], jobs: int) -> Row:
    """The same once more, with everything in the cache."""
    with _empty_cache() as cache:
        _stages("cold", config, Granularity(), jobs, 1, cache)
        return _stages("warm", config, Granularity(), jobs, 1, cache)


def _stages(
    name: str,
    config: dict[str, Any],
    granularity: Granularity,
    jobs: int,
    world: int,
    cache: Cache,
) -> Row:
    target = host_target()
    started, cpu = time.perf_counter(), _cpu_of_children()
    plan, times = ensure_plan(config, VARIANTS["f32"], target, cache, granularity, with_mlir=True)
    planned = time.perf_counter()
    ranges = layer_ranges(plan.layers, world)
    cut = CutGraph.read(plan, config["model_type"], cache.graph_path(plan.key))
    faults = cut.verify(ranges).violations
    assert not faults, faults
    verified = time.perf_counter()
    rank = min(1, world - 1)
    keys = plan.objects(plan.for_rank(ranges[rank], block_role(rank, world)))
    ensure_objects(keys, target, cache, jobs)
    now = time.perf_counter()
    return Row(
        name,
        times.export,
        times.imports,
        verified - planned,
        now - verified,
        now - started,
        _cpu_of_children() - cpu,
        len(keys),
        sum(len(cache.read_object(key) or b"") for key in keys),
    )


def _measure_naive(config: dict[str, Any]) -> Row:
    cpu = _cpu_of_children()
    times = compile_naively(config, _NAIVE_TOKENS, host_target())
    total = times.export + times.imports + times.compile
    stages = (times.export, times.imports, 0.0, times.compile)
    return Row("naive", *stages, total, _cpu_of_children() - cpu, 1, times.bytes)


def _measure_command(
    name: str, config: dict[str, Any], jobs: int, *more: str, warm: bool = False
) -> Row:
    """`buddy-pipeline build` on a folder that holds a config.json only; `warm` for the second."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json_text.dumps(config))
        (root / "spec.json").write_text('{"variant": "f32"}')
        words = ["build", "--spec", "spec.json", "--local-model", "model", "--skip-weights"]
        words += ["--build-dir", "build", "--cache-dir", "cache", "-j", str(jobs)]
        words += ["--time-report", "times.json", *more]
        environment = command.user_environment()
        for _ in range(1 + warm):
            started, cpu = time.perf_counter(), _cpu_of_children()
            run = subprocess.run(
                [_COMMAND, *words], cwd=root, env=environment, capture_output=True, text=True
            )
            total, cpu = time.perf_counter() - started, _cpu_of_children() - cpu
            if run.returncode != 0:
                raise UserError(f"{' '.join(words)} failed: {run.stderr.strip()}")
        report = json_text.loads((root / "times.json").read_text())
        stages = (report["seconds"][stage] for stage in ("export", "import", "verify", "compile"))
        size = sum(file.stat().st_size for file in (root / "build" / "objects").iterdir())
        return Row(name, *stages, total, cpu, len(report["objects"]), size)


_COMMAND = Path(sys.executable).parent / "buddy-pipeline"


def _cpu_of_children() -> float:
    """CPU seconds of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _empty_cache() -> Any:
    """A context manager with a cache that holds nothing."""
    return _CacheFolder()


class _CacheFolder(tempfile.TemporaryDirectory):
    def __enter__(self) -> Cache:  # type: ignore[override]
        return Cache.open(Path(super().__enter__()))


if __name__ == "__main__":
    command.main(main)
