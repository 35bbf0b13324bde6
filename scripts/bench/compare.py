#!/usr/bin/env python3
"""Compares this project with transformers and llama.cpp on the same weights and threads.

Method: every contestant is a child process with the model loaded; in each round each is asked once,
in turn, for the seconds of a prefill from an empty cache and of a decode behind a context; the
medians count, and ratios are of the same round. All are fed the same random token ids and nobody
samples. transformers: the stock class, sdpa attention, dynamic cache. llama.cpp: its C interface in
llama-cpp-python, the same number of threads for both phases, no prefix kept, its own defaults
otherwise; the GGUF is written by the gguf package from the same weights, embedding and head in the
same format (`own` is the model's own GGUF file).

Limits: one sequence. Formats differ in what they compute; the last column says how far the logits
after the prompt are from those of our first variant, relative to their deviation. All models are in
memory at once.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchkit.child import Child, child, run_in_child
from benchkit.command import check_json_path, main, team_sizes
from benchkit.contestants import ModelChoice, Ours, random_ids
from benchkit.gguf_export import check_architecture, export_gguf
from benchkit.peers import (
    LLAMA_CPP,
    OWN_FILE,
    TRANSFORMERS,
    LlamaCpp,
    Peer,
    Transformers,
    parse_peers,
)
from benchkit.report import describe, machine, summary, table, write_json
from buddy_pipeline.partition.errors import UserError


def compare(
    spec: Annotated[str, typer.Option(help="A shipped spec or JSON file.")],
    local_model: Annotated[
        Path | None, typer.Option(help="Weights for the spec, as for buddy-pipeline.")
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Our number format; may be repeated.")
    ] = None,
    peers: Annotated[
        str, typer.Option(help="Such as transformers:f32,transformers:bf16,llama.cpp:F16.")
    ] = "transformers:f32,transformers:bf16,llama.cpp:F16",
    threads: Annotated[
        str | None, typer.Option(help="Team sizes, such as 1,2; default: 1 and all cores.")
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 256,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the decoded ones.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Tokens decoded in a round.")] = 64,
    rounds: Annotated[int, typer.Option(min=5, help="Repetitions; the median counts.")] = 5,
    gguf_dir: Annotated[
        Path | None, typer.Option(help="Keeps the written GGUF files here; default: nowhere.")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Our compiled objects.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the figures here.")] = None,
) -> None:
    """Compares with peers on the same weights and threads, alternating."""
    check_json_path(json)
    teams, rivals = team_sizes(threads), parse_peers(peers)
    forms: list[str | None] = [*variant] if variant else [None]
    longest = max(prefill, context + steps)
    ours = [ModelChoice(spec, local_model, form, longest) for form in forms]
    names = [f"ours:{choice.open().variant}" for choice in ours]
    files = [p.format for p in rivals if p.engine == LLAMA_CPP]
    for form in files:
        _check_file(ours[0], form)
    facts = machine()
    print(describe(facts))
    with ExitStack() as stack:
        if gguf_dir is None:
            gguf_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        paths = {form: _gguf_file(ours[0], form, gguf_dir) for form in files}
        results = []
        for team in teams:
            makers: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
            for name, choice in zip(names, ours, strict=True):
                makers[name] = (Ours, (choice, team, cache_dir))
            for peer in rivals:
                makers[peer.name] = _peer_maker(peer, ours[0], team, paths)
            with ExitStack() as running:
                processes = {
                    name: running.enter_context(child(name, make, *args))
                    for name, (make, args) in makers.items()
                }
                seconds = measure(processes, prefill, context, steps, rounds)
                distance = distances(processes, prefill)
            results.append(
                {
                    "threads": team,
                    "contestants": figures(seconds, prefill, steps),
                    "ratios": ratios(seconds, names),
                    "logits_distance": distance,
                }
            )
    for result in results:
        print()
        print(_tables(result))
    report = {"machine": facts, "spec": spec, "method": __doc__, "results": results}
    lengths = {"prefill": prefill, "context": context, "steps": steps}
    write_json(json, report | lengths)


#: Tokens of the prompt that shows whether llama.cpp works: enough for its matrix kernels.
_PROBE = 64

Seconds = dict[str, dict[str, list[float]]]
"""Of each round, by contestant and phase ("prefill" or "decode")."""


def measure(
    processes: dict[str, Child], prefill: int, context: int, steps: int, rounds: int
) -> Seconds:
    """Asks every process in turn, `rounds` times; one more round before warms them up."""
    ids = random_ids(max(prefill, context + steps))
    seconds: Seconds = {name: {"prefill": [], "decode": []} for name in processes}
    for number in range(rounds + 1):
        for name, process in processes.items():
            first = process.call("prefill", ids[:prefill])
            second = process.call("decode", ids[: context + steps], context)
            if number:
                seconds[name]["prefill"].append(first)
                seconds[name]["decode"].append(second)
    return seconds


def figures(seconds: Seconds, prefill: int, steps: int) -> dict[str, Any]:
    """Tokens/s by contestant and phase."""
    tokens = {"prefill": prefill, "decode": steps}
    return {
        name: {
            phase: summary([tokens[phase] / s for s in samples]) for phase, samples in of.items()
        }
        for name, of in seconds.items()
    }


def ratios(seconds: Seconds, ours: list[str]) -> list[dict[str, Any]]:
    """How many times as fast as each other contestant each of `ours` is, round by round."""
    found = []
    for mine in ours:
        for other in seconds:
            if other == mine:
                continue
            pair: dict[str, Any] = {"ours": mine, "other": other}
            for phase in ("prefill", "decode"):
                both = zip(seconds[mine][phase], seconds[other][phase], strict=True)
                pair[phase] = summary([theirs / own for own, theirs in both])
            found.append(pair)
    return found


def distances(processes: dict[str, Child], prefill: int) -> dict[str, float]:
    """How far each contestant's logits after one prompt are from the first's: root mean square of
    the difference over the deviation of the first's."""
    ids = random_ids(prefill)
    logits = {name: process.call("logits", ids) for name, process in processes.items()}
    first = next(iter(logits.values()))
    return {
        name: float(np.sqrt(np.mean((each[: len(first)] - first) ** 2)) / first.std())
        for name, each in logits.items()
    }


def _peer_maker(
    peer: Peer, choice: ModelChoice, team: int, paths: dict[str, Path]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if peer.engine == TRANSFORMERS:
        return Transformers, (choice, peer.format, team)
    arguments = (paths[peer.format], team, choice.longest)
    return LlamaCpp, (*arguments, _repacks(peer.name, arguments))


def _repacks(name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether llama.cpp survives a prompt with its own weight layouts. With version 0.3.36 of
    llama-cpp-python, built by GCC, its AMX kernels end in an illegal instruction."""
    try:
        with child(name, LlamaCpp, *arguments) as process:
            process.call("prefill", random_ids(_PROBE))
    except RuntimeError:
        print(f"{name} dies with its own weight layouts, so it runs without them")
        return False
    return True


def _check_file(choice: ModelChoice, form: str) -> None:
    checkpoint = choice.open().checkpoint
    if form != OWN_FILE:
        check_architecture(checkpoint)
    elif checkpoint.path.suffix != ".gguf":
        raise UserError(f"--peers llama.cpp:{form}: {checkpoint.path} is no GGUF file")


def _gguf_file(choice: ModelChoice, form: str, folder: Path) -> Path:
    """The model as GGUF in this format, written if it is not in the folder yet."""
    source = choice.open().checkpoint.path
    if form == OWN_FILE:
        return source
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{source.stem}-{form}.gguf"
    if not path.exists():
        run_in_child("the GGUF writer", _write_gguf, source, path, form)
    return path


def _write_gguf(source: Path, path: Path, form: str) -> None:
    from buddy_pipeline.ranks.checkpoint import open_checkpoint

    partial = path.with_suffix(".part")
    export_gguf(open_checkpoint(source), partial, form)
    partial.replace(path)


def _tables(result: dict[str, Any]) -> str:
    def spread(figure: dict[str, Any], digits: int) -> str:
        low, high = figure["min"], figure["max"]
        return f"{figure['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    rows = [
        (
            name,
            spread(of["prefill"], 0),
            spread(of["decode"], 1),
            f"{result['logits_distance'][name]:.1e}",
        )
        for name, of in result["contestants"].items()
    ]
    pairs = [
        (f"{r['ours']} / {r['other']}", spread(r["prefill"], 2), spread(r["decode"], 2))
        for r in result["ratios"]
    ]
    threads = f"{result['threads']} thread" + ("s" if result["threads"] > 1 else "")
    head = (f"{threads}, tokens/s", "prefill", "decode", "logits off by")
    times = (f"{threads}, times as fast", "prefill", "decode")
    return f"{table(head, rows)}\n\n{table(times, pairs)}"


if __name__ == "__main__":
    main(compare)
