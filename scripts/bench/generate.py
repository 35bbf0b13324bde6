#!/usr/bin/env python3
"""Measures prefill and decode of models in this process tree, as tokens/s and share of the limits.

Method: each model, variant and team of threads is one process, which measures the machine's limits
(see roofline.py) with the same team before, between and after the model's runs. Rounds alternate
over all measurements; the median counts. A limit is the best seen in the run.

Decode: bytes to read (each weight once, a tied head too; rows gathered from an embedding do not
count; keys and values up to the length) over read bandwidth. Prefill: 2 · weights · tokens (the
head's weights for one token) and attention, 2 · heads · (key + value size) for each pair of tokens,
over the multiply-add peak of the variant's arithmetic.

Limits: one sequence, one rank, random token ids, no sampling. What else runs on the machine lowers
shares: a measurement may be disturbed where the limit was not. Models that fit a cache are not
bound by memory, so that their decode share says little.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import typer

from benchkit.child import Child, child, run_in_child
from benchkit.command import check_json_path, main, team_sizes, whole_numbers
from benchkit.contestants import ModelChoice, Ours, random_ids
from benchkit.limits import Limits, compile_loops
from benchkit.report import describe, machine, summary, table, write_json
from benchkit.work import Work
from buddy_pipeline.compile.target import host_target

_LIMIT_REPETITIONS = 3


@dataclass(frozen=True)
class Phase:
    """One measurement: a prompt of `length`, or `steps` tokens behind a context of `length`."""

    kind: str
    """"prefill" or "decode"."""
    length: int
    steps: int
    """Tokens of one decode measurement; 0 for prefill."""

    @property
    def tokens(self) -> int:
        """Tokens that the time is for."""
        return self.steps or self.length

    def least_seconds(self, work: Work, limits: Limits, variant: str) -> float:
        """The time at the machine's limit."""
        if self.kind == "prefill":
            return work.prefill_flops(self.length) / peak(limits, variant)
        contexts = range(self.length, self.length + self.steps)
        return sum(map(work.decode_bytes, contexts)) / limits.read_bytes_per_s


def peak(limits: Limits, variant: str) -> float:
    """FLOP/s of the arithmetic that a variant can use: pairs of bf16 where the CPU has them."""
    if variant == "bf16" and limits.bf16_flops_per_s is not None:
        return limits.bf16_flops_per_s
    return limits.f32_flops_per_s


def generate(
    spec: Annotated[list[str], typer.Option(help="A shipped spec or JSON file; may be repeated.")],
    local_model: Annotated[
        Path | None, typer.Option(help="Weights for the spec, as for buddy-pipeline.")
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Number format; may be repeated. Default: the spec's.")
    ] = None,
    threads: Annotated[
        str | None, typer.Option(help="Team sizes, such as 1,2; default: 1 and all cores.")
    ] = None,
    prefill: Annotated[str, typer.Option(help="Lengths of prompts.")] = "64,256,1024",
    decode: Annotated[str, typer.Option(help="Contexts to decode at.")] = "128,1024",
    steps: Annotated[int, typer.Option(min=1, help="Tokens of one decode measurement.")] = 32,
    rounds: Annotated[int, typer.Option(min=5, help="Repetitions; the median counts.")] = 5,
    megabytes: Annotated[
        int, typer.Option(min=64, help="Size of what is read for the bandwidth.")
    ] = 1024,
    cache_dir: Annotated[Path | None, typer.Option(help="Compiled objects.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Measures tokens/s of prefill and decode, and their share of the machine's limits."""
    check_json_path(json)
    teams = team_sizes(threads)
    phases = [Phase("prefill", n, 0) for n in whole_numbers("--prefill", prefill)]
    phases += [Phase("decode", n, steps) for n in whole_numbers("--decode", decode)]
    longest = max(phase.length + phase.steps for phase in phases)
    forms: list[str | None] = [*variant] if variant else [None]
    choices = [ModelChoice(name, local_model, form, longest) for name in spec for form in forms]
    variants = [choice.open().variant for choice in choices]  # a mistake shows before any waiting
    facts = machine()
    print(describe(facts))
    objects = run_in_child("the compiler", compile_loops, host_target())
    results = []
    for choice, form in zip(choices, variants, strict=True):
        for team in teams:
            with child(choice.spec, Ours, choice, team, cache_dir) as process:
                process.call("prepare_limits", objects, megabytes)
                result = measure(process, phases, form, rounds)
            results.append({"spec": choice.spec, "variant": form, "threads": team, **result})
    print(table(("model", "variant", "threads", *_HEAD), [r for x in results for r in _rows(x)]))
    write_json(json, {"machine": facts, "method": __doc__, "results": results})


def measure(process: Child, phases: list[Phase], variant: str, rounds: int) -> dict[str, Any]:
    """One process's figures: limits, and for each phase tokens/s and share of the limit."""
    longest = max(phase.length + phase.steps for phase in phases)
    ids = random_ids(longest)
    seconds: dict[Phase, list[float]] = {phase: [] for phase in phases}
    limits = [process.call("limits", _LIMIT_REPETITIONS)]
    process.call("prefill", ids[: min(64, longest)])  # touches the weights once
    for _ in range(rounds):
        for phase, samples in seconds.items():
            part = ids[: phase.length + phase.steps]
            if phase.kind == "prefill":
                samples.append(process.call("prefill", part))
            else:
                samples.append(process.call("decode", part, phase.length))
        limits.append(process.call("limits", _LIMIT_REPETITIONS))
    best = reduce(Limits.best, limits)
    work: Work = process.call("count_work")
    return {
        "limits": asdict(best),
        "work": asdict(work),
        "phases": [
            figures(phase, samples, phase.least_seconds(work, best, variant))
            for phase, samples in seconds.items()
        ],
    }


def figures(phase: Phase, seconds: list[float], least: float) -> dict[str, Any]:
    """Tokens/s of one phase and its share of the rate that `least` seconds would be."""
    rates = summary([phase.tokens / each for each in seconds])
    limit = phase.tokens / least
    return {
        **asdict(phase),
        "tokens_per_s": rates,
        "limit_tokens_per_s": limit,
        "share": rates["median"] / limit,
    }


_HEAD = ("phase", "tokens/s", "lowest", "highest", "limit", "share")


def _rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    name = (result["spec"], result["variant"], str(result["threads"]))
    limits = Limits(**result["limits"])
    rows: list[tuple[str, ...]] = []
    for phase in result["phases"]:
        rates = phase["tokens_per_s"]
        shown = [f"{rates[k]:.1f}" for k in ("median", "min", "max")]
        limit = f"{phase['limit_tokens_per_s']:.1f}"
        place = f"{phase['kind']} {phase['length']}"
        rows.append((*name, place, *shown, limit, f"{phase['share']:.0%}"))
    flops = peak(limits, result["variant"])
    measured = f"{limits.read_bytes_per_s / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s"
    rows.append((*name, "limits", measured, "", "", "", ""))
    return rows


if __name__ == "__main__":
    main(generate)
