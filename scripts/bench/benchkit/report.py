"""What every benchmark prints: the machine, a table, and the same as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from buddy_pipeline.compile.cache import write_atomically
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.ranks.affinity import available_cores


def machine() -> dict[str, Any]:
    """What figures depend on."""
    target = host_target()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_model(),
        "llvm_cpu": target.cpu,
        "vector_bits": target.vector_bits,
        "cores": len(available_cores()),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def describe(facts: dict[str, Any]) -> str:
    """`machine()` in one line."""
    return (
        f"{facts['date']}, {facts['cpu']} ({facts['llvm_cpu']}, {facts['vector_bits']}-bit vectors)"
        f", {facts['cores']} cores, load average {facts['load']:.1f} at the start"
    )


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median, smallest, largest, and all samples in order."""
    return {
        "median": median(samples),
        "min": min(samples),
        "max": max(samples),
        "samples": list(samples),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns, the first left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows)])


def write_json(path: Path | None, data: dict[str, Any]) -> None:
    """Writes the report, if one is wanted."""
    if path is not None:
        write_atomically(path, (json.dumps(data, indent=2) + "\n").encode())


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
