#!/usr/bin/env python3
"""Measures the pipeline itself: many sequences, several ranks, the policy on simulated stages.

1. identity: 16 sequences of mixed lengths and arrivals, greedy and sampled with seeds, on worlds 1,
   2 and 4: digests of all tokens and logits against those of each alone on one rank.
2. hop: a one-token step of 1,536 f32 around a ring of two ranks, divided by two; beside it an MPI
   message of that length, received by blocking.
3. one sequence on four ranks over one rank, one thread a rank (one rank works at a time).
4. batch: 8 and 16 sequences over one, on one rank with one thread.
5. two ranks over one, one thread each: decode of 64 sequences with `--balance measured` and the
   ranks' busy shares, prefill of one 1,024-token prompt; beside them what two cores give over one.
   Busy shares come from the product's profile: the part of the time in which a rank runs its block,
   while all sequences decode, and from the first block to the last.
7. policy: sequences of mixed lengths on 64 simulated stages: share of the time in which stages are
   idle, beside that of filling and draining alone; time of a decision with few and many waiting.

Method: each world is one start of all ranks; worlds to be compared alternate over the rounds, and
the ratio is that of the medians. Limits: random token ids. With as many ranks as cores, whatever
else runs on the machine takes a core from a rank and makes the others wait for it.
"""

from __future__ import annotations

import json as json_text
import random
import subprocess
import sys
import time
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchkit.child import child, run_in_child
from benchkit.command import check_json_path, main, whole_numbers
from benchkit.limits import Limits as CoreLimits
from benchkit.limits import Objects, compile_loops
from benchkit.pipeline_tasks import Task, Team
from benchkit.report import describe, machine, table, write_json
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.scheduler import Limits, Microbatch, Scheduler
from buddy_pipeline.ranks.sequence import Sequence
from buddy_pipeline.ranks.slots import Slots, kv_tiers

_ROOT = Path(__file__).parents[2]
_MPIRUN = Path(sys.executable).parent / "mpirun"
_ITEMS = "1,2,3,4,5,7"
Row = tuple[str, str, str]
"""What, the figure, what it should be."""


def pipeline(
    spec: Annotated[str, typer.Option(help="A shipped spec or JSON file.")] = "smollm2-135m",
    local_model: Annotated[str | None, typer.Option(help="Weights for the spec.")] = None,
    variant: Annotated[str | None, typer.Option(help="Number format.")] = None,
    items: Annotated[str, typer.Option(help="Which of the items to measure.")] = _ITEMS,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 5,
    simulated: Annotated[int, typer.Option(min=1, help="Sequences of item 7.")] = 10_000,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
    task: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measures the pipeline itself."""
    if task is not None:
        result = Task(**json_text.loads(task)).run()
        if result is not None:
            print(json_text.dumps(result))
        return
    check_json_path(json)
    base = Task("", 1, spec, local_model, variant, rounds=1)
    facts = machine()
    print(describe(facts))
    chosen = whole_numbers("--items", items)
    rows: list[Row] = []
    for number in chosen:
        if number not in _MEASURES and number != 7:
            raise UserError(f"--items {items}: there is no item {number}, only {_ITEMS}")
        rows += policy(simulated) if number == 7 else _MEASURES[number](base, rounds)
    print(table(("what", "seen", "wanted"), rows))
    write_json(json, {"machine": facts, "method": __doc__, "spec": spec, "rows": rows})


def identity(base: Task, rounds: int) -> list[Row]:
    """Item 1."""
    digests = {
        world: start(replace(base, name="identity", world=world, sequences=16, prompt=200))
        for world in (1, 2, 4)
    }
    rows = []
    for world, found in digests.items():
        same = sum(a == b for a, b in zip(found["together"], digests[1]["alone"], strict=True))
        alone = found["alone"] == digests[1]["alone"]
        seen = f"{same} of 16 together, {'all' if alone else 'NOT all'} alone"
        rows.append((f"identical to one rank alone, world {world}", seen, "16, all"))
    return rows


def hop(base: Task, rounds: int) -> list[Row]:
    """Item 2."""
    found = start(replace(base, name="hop", world=2, rounds=1000 * rounds))
    shown = {name: f"{median(of):.1f} µs (least {min(of):.1f})" for name, of in found.items()}
    return [
        ("one hop of a step", shown["steps"], "at most 30 µs"),
        ("an MPI message of the same length", shown["plain"], "the floor"),
    ]


def one_on_four(base: Task, rounds: int) -> list[Row]:
    """Item 3."""
    one = replace(base, name="decode")
    ratio, spread = compare(one, replace(one, world=4), rounds)
    return [("one sequence, four ranks over one", f"{ratio:.2f} {spread}", "at least 0.85")]


def batches(base: Task, rounds: int) -> list[Row]:
    """Item 4."""
    rows = []
    for sequences, wanted in ((8, 6), (16, 9)):
        one = replace(base, name="decode")
        ratio, spread = compare(one, replace(one, sequences=sequences), rounds)
        what = f"batch of {sequences} over one sequence"
        rows.append((what, f"{ratio:.2f} {spread}", f"at least {wanted}"))
    return rows


def two_over_one(base: Task, rounds: int) -> list[Row]:
    """Item 5."""
    objects = run_in_child("the compiler", compile_loops, host_target())
    one, two = _cores(objects, 1), _cores(objects, 2)
    flops = two.f32_flops_per_s / one.f32_flops_per_s
    read = two.read_bytes_per_s / one.read_bytes_per_s
    rows = [
        ("two cores over one: f32 peak, read", f"{flops:.2f}, {read:.2f}", "the machine's limit")
    ]
    many = replace(base, name="decode", sequences=64)
    shared = replace(many, world=2, balance="measured")
    ratio, spread = compare(many, shared, rounds)
    rows.append(("decode of 64, two ranks over one", f"{ratio:.2f} {spread}", "at least 1.8"))
    rows += _busy(shared)
    prompt = replace(base, name="prefill", prompt=1024)
    ratio, spread = compare(prompt, replace(prompt, world=2), rounds)
    rows.append(("prefill of 1,024, two ranks over one", f"{ratio:.2f} {spread}", "at least 1.65"))
    return rows


def _cores(objects: Objects, count: int) -> CoreLimits:
    """What so many cores give at once."""
    with child(f"{count} threads", Team, objects, count) as team:
        found: CoreLimits = team.call("measure")
    return found


def _busy(task: Task) -> list[Row]:
    """Each rank's busy share by the product's own profile: while all sequences decode, and of the
    whole job."""
    with TemporaryDirectory() as folder:
        done = _started(replace(task, name="decode_windows", rounds=2, profile_out=folder))
        trace = json_text.loads((Path(folder) / "trace.json").read_text())
    windows = [(begin, end) for begin, end, _ in json_text.loads(done.stdout)]
    shares = [_share(trace, rank, windows) for rank in range(task.world)]
    steady = ", ".join(f"rank {rank} {100 * share:.1f} %" for rank, share in enumerate(shares))
    whole = next(
        line.partition(": ")[2] for line in done.stderr.splitlines() if line.startswith("busy over")
    )
    return [
        ("busy while all decode", steady, "at least 90 % each"),
        ("busy from the first step to the last", whole, "(prompts and start included)"),
    ]


def _share(trace: dict[str, Any], rank: int, windows: Items[tuple[int, int]]) -> float:
    """The part of these windows, ns on rank 0's clock, in which a rank ran its block."""
    start = trace["otherData"]["start_ns"]
    busy = 0.0
    for event in trace["traceEvents"]:
        if event.get("cat") == "step" and event["name"] == "run" and event["pid"] == rank:
            begin = start + 1e3 * event["ts"]
            end = begin + 1e3 * event["dur"]
            busy += sum(max(0.0, min(end, last) - max(begin, first)) for first, last in windows)
    return busy / sum(last - first for first, last in windows)


def policy(count: int) -> list[Row]:
    """Item 7."""
    sys.path.insert(0, str(_ROOT))
    from tests.ranks.simulation import simulate

    stages, steps = 64, 0
    chance = random.Random(1)
    arrivals = [
        (float(i), _sequence(i, chance.randint(1, 100)), chance.randint(1, 12))
        for i in range(count)
    ]

    def cost(stage: int, microbatch: Microbatch) -> float:
        return float(max(13, sum(p.stop - p.start for p in microbatch.pieces)))

    def counted(microbatch: Microbatch) -> None:
        nonlocal steps
        steps += 1

    outcome = simulate(_scheduler(stages), arrivals, cost, counted)
    in_order = outcome.admitted == [sequence for _, sequence, _ in arrivals]
    least = (stages - 1) / (steps + stages - 1)
    few, many = _decision_us(100), _decision_us(100 * count)
    return [
        ("simulated sequences finished", f"{len(outcome.finished)} of {count}", "all"),
        ("prompts begun in order of arrival", str(in_order), "True"),
        ("idle share of 64 stages", f"{outcome.bubble:.3f}", f"{least:.3f} to fill and drain"),
        (f"decision, 100 and {100 * count} waiting", f"{few:.0f} and {many:.0f} µs", "equal"),
    ]


def _scheduler(stages: int, prefill_chunk: int | None = None) -> Scheduler:
    sequences = 4 * stages
    limits = Limits(
        stages=stages,
        tokens=512,
        sequences=sequences,
        microbatches=stages + 1,
        decode_groups=stages,
        prefill_chunk=prefill_chunk,
    )
    return Scheduler(limits, Slots(2 * sequences, kv_tiers(2048), 1 << 24))


def _sequence(first: int, length: int) -> Sequence:
    return Sequence([first, *range(1, length)], lambda logits, history: 0)


def _decision_us(waiting: int) -> float:
    """Median time of a decision that admits a sequence."""
    times = []
    scheduler = _scheduler(64, prefill_chunk=64)  # so that all decisions are of one size
    for i in range(waiting):
        scheduler.add(_sequence(i, 30))
    for _ in range(60):
        begun = time.perf_counter()
        scheduler.next()
        times.append((time.perf_counter() - begun) * 1e6)
    return median(times)


def compare(one: Task, other: Task, rounds: int) -> tuple[float, str]:
    """The rate of `other` over that of `one`: ratio of medians, and the range of ratios."""
    ones: list[float] = []
    others: list[float] = []
    for _ in range(rounds):
        ones += start(replace(one, rounds=2))
        others += start(replace(other, rounds=2))
    ratios = [b / a for a, b in zip(ones, others, strict=True)]
    return median(others) / median(ones), f"({min(ratios):.2f} to {max(ratios):.2f})"


def start(task: Task) -> Any:
    """Runs a task on its ranks; its result."""
    return json_text.loads(_started(task).stdout)


def _started(task: Task) -> subprocess.CompletedProcess[str]:
    launcher: Items[object] = (_MPIRUN, "-n", task.world) if task.world > 1 else ()
    command = [*launcher, sys.executable, __file__, "--task", json_text.dumps(task.fields())]
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise UserError(f"{task.name} on {task.world} ranks ended with code {done.returncode}")
    return done


_MEASURES = {1: identity, 2: hop, 3: one_on_four, 4: batches, 5: two_over_one}


if __name__ == "__main__":
    main(pipeline)
