#!/usr/bin/env python3
"""Packing a checkpoint's weights to files: direct against joined, and reuse.

    scripts/bench/weights.py CHECKPOINT [--variant f32] [--only direct,reuse] [--json FILE]

Direct streams one packed tensor after the other to disk, joined packs all in memory and joins them
(`import --no-direct-weight-export`). Each way is a process of its own that writes into an empty
folder; reuse is a second export over the direct one. Seconds are those of the export with its
`fsync`, without starting the process; memory is the most that the process had of its own (RssAnon,
looked at every 5 ms), without the pages of the checkpoint's file. The two folders are then compared
byte by byte. The checkpoint must be in the page cache to compare packing and not the disk: read it
once before.
"""

from __future__ import annotations

import filecmp
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer

from benchkit import command, report
from benchkit.child import run_in_child
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.manifest import Plan
from buddy_pipeline.compile.service import ensure_plan
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.launcher.variants import known_variant
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.packing import packed_bytes
from buddy_pipeline.ranks.weight_files import export_weights

_WAYS = ("direct", "joined", "reuse")
_LOOK_S = 0.005
REUSE_TARGET_S = 1.0


@dataclass(frozen=True)
class Row:
    """One export."""

    way: str
    seconds: float
    peak_bytes: int
    """Of the process's own memory, above what it had before."""
    written: int
    reused: int
    bytes: int


def weights(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face directory or .gguf file.")],
    variant: Annotated[str, typer.Option(help="Number format.")] = "f32",
    only: Annotated[str, typer.Option(help="What to measure, in order.")] = ",".join(_WAYS),
    folder: Annotated[Path | None, typer.Option(help="Where to write; default temporary.")] = None,
    json: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
) -> None:
    """Measures and prints a table."""
    command.check_json_path(json)
    wanted = only.split(",")
    if not set(wanted) <= set(_WAYS):
        raise UserError(f"--only {only!r} is not known: use some of {', '.join(_WAYS)}")
    formats, cache = known_variant(variant), Cache.open(None)
    config = open_checkpoint(checkpoint).config
    plan, _ = ensure_plan(config, formats, host_target(), cache)
    size = _packed_size(plan)
    if "joined" in wanted:
        _check_memory(2 * size)
    facts = report.machine()
    print(f"{checkpoint}, {variant}, {size / 1e9:.2f} GB packed")
    print(report.describe(facts))
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as made:
        for way in wanted:
            target = Path(made) / ("direct" if way == "reuse" else way)
            measure = (checkpoint, variant, cache.plan_path(plan.key), target, way)
            rows.append(run_in_child(way, _export, *measure))
            print(f"{way}: {rows[-1].seconds:.2f} s", flush=True)
        same = _same(Path(made)) if {"direct", "joined"} <= set(wanted) else None
    head = ("way", "s", "GB/s", "peak MB", "written", "reused")
    print(report.table(head, [_cells(row) for row in rows]))
    if same is not None:
        print("the files are the same, byte by byte" if same else "THE FILES DIFFER")
    if "reuse" in wanted:
        print(f"reuse is to take at most {REUSE_TARGET_S:.0f} s")
    data = {"variant": variant, "bytes": size, "identical": same, "rows": [asdict(r) for r in rows]}
    report.write_json(json, {"machine": facts, "method": __doc__, **data})


def _cells(row: Row) -> tuple[str, ...]:
    speed = f"{row.bytes / row.seconds / 1e9:.2f}" if row.written else ""
    peak = f"{row.peak_bytes / 1e6:.0f}"
    return (row.way, f"{row.seconds:.2f}", speed, peak, str(row.written), str(row.reused))


def _packed_size(plan: Plan) -> int:
    parameters = {p for partition in plan.partitions for p in partition.parameters}
    return sum(packed_bytes(parameter) for parameter in parameters)


def _check_memory(needed: int) -> None:
    free = psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"joined takes {needed:,} bytes of memory and {free:,} are free: give"
            " --only direct,reuse or a smaller --variant"
        )


def _export(checkpoint: Path, variant: str, plan_path: Path, target: Path, way: str) -> Row:
    """One export, in a process of its own."""
    plan = Plan.from_json(plan_path.read_text())
    source = open_checkpoint(checkpoint)
    with _Peak() as peak:
        done = export_weights(target, plan.partitions, source, variant, direct=way != "joined")
    return Row(way, done.seconds, peak.bytes, len(done.written), len(done.reused), done.bytes)


class _Peak:
    """The most memory of its own that this process has inside the `with`, above what it had."""

    def __enter__(self) -> _Peak:
        self._before = self.bytes = _own_memory()
        self._ended = threading.Event()
        self._looker = threading.Thread(target=self._look)
        self._looker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._looker.join()
        self.bytes -= self._before

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.bytes = max(self.bytes, _own_memory())


def _own_memory() -> int:
    """Bytes of memory that no file stands behind."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise UserError("this system does not say RssAnon in /proc/self/status: measure on Linux")


def _same(folder: Path) -> bool:
    """Whether both ways have written the same files."""
    names = sorted(path.name for path in (folder / "direct").glob("*.bin"))
    others = sorted(path.name for path in (folder / "joined").glob("*.bin"))
    _, differing, failed = filecmp.cmpfiles(
        folder / "direct", folder / "joined", names, shallow=False
    )
    return names == others and not differing and not failed


if __name__ == "__main__":
    command.main(weights)
