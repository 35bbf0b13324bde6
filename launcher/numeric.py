"""`verify --numeric`: partitioned code against the whole graph's, and against transformers."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.granularity import Granularity, Sharing
from buddy_pipeline.compile.target import Target
from buddy_pipeline.launcher.loading import StepSizes, open_engine
from buddy_pipeline.launcher.model import Model
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError

#: Greedy steps after each prompt.
STEPS = 16
#: Largest difference from transformers, as a part of the largest logit, by variant: f32 sums in
#: another order; 16-bit weights are rounded once.
_TOLERANCE = {"f32": 1e-4, "bf16": 5e-2, "f16": 1e-2}


@dataclass(frozen=True)
class Difference:
    """How far two sets of logits are apart."""

    identical: bool
    largest: float
    relative: float
    """To the largest logit."""
    same_tokens: bool
    """Whether every row's best token is the same."""


@dataclass(frozen=True)
class PromptReport:
    """The comparisons of one prompt; `prefill` has its every token's logits."""

    prompt: str
    tokens: tuple[int, ...]
    """The greedy continuation."""
    whole_graph: dict[str, Difference]
    transformers: dict[str, Difference]


@dataclass(frozen=True)
class NumericReport:
    """What `verify --numeric` saw."""

    ok: bool
    variant: str
    strategy: str
    tolerance: float
    prompts: tuple[PromptReport, ...]

    def to_json(self) -> str:
        """The report as indented JSON."""
        return json.dumps(asdict(self), indent=2)


Logits = dict[str, dict[str, np.ndarray]]
"""By prompt: `prefill`, float32 [tokens, vocab], and `decode`, float32 [STEPS, vocab]."""


def compare(model: Model, prompts: Mapping[str, Sequence[int]], cache: Cache) -> NumericReport:
    """Runs the prompts (ids by text) in three ways, all along the same tokens: the partitioned
    code's own greedy ones. Exact between partitioned and whole graph, within the variant's
    tolerance of transformers.

    The partitioned code and its weights are those that were built, if the model comes from there;
    the whole graph is then compiled for the same CPU, as others add in another order.
    """
    tokens: dict[str, list[int]] = {}
    partitioned = _run(model, prompts, tokens, cache)
    whole_graph = Granularity("coarse", Sharing.KERNELS)
    made_anew = replace(model, granularity=whole_graph, prebuilt=None)
    target = None if model.prebuilt is None else Target(**model.prebuilt.plan.target)
    whole = _run(made_anew, prompts, tokens, cache, target)
    reference = _reference(model, prompts, tokens)
    tolerance = _TOLERANCE.get(model.variant, 1e-1)
    reports, ok = [], True
    for prompt in prompts:
        exact = {k: _difference(v, whole[prompt][k]) for k, v in partitioned[prompt].items()}
        close = {k: _difference(v, reference[prompt][k]) for k, v in partitioned[prompt].items()}
        ok &= all(d.identical for d in exact.values())
        ok &= all(d.relative <= tolerance for d in close.values())
        reports.append(PromptReport(prompt, tuple(tokens[prompt]), exact, close))
    strategy = model.granularity.strategy
    return NumericReport(bool(ok), model.variant, strategy, tolerance, tuple(reports))


def _run(
    model: Model,
    prompts: Mapping[str, Sequence[int]],
    tokens: dict[str, list[int]],
    cache: Cache,
    target: Target | None = None,
) -> Logits:
    """Our logits; `tokens` are followed, and filled in where a prompt has none yet."""
    longest = max(len(ids) for ids in prompts.values()) + STEPS
    if longest > model.context:
        raise UserError(
            f"--prompt of {counted(longest - STEPS, 'token')} and {STEPS} steps do not fit the"
            f" context of {model.context}: give a shorter prompt"
        )
    small = replace(model, context=longest)
    found: Logits = {}
    sizes = StepSizes(tokens=64, rows=64, slots=1)
    with open_engine(small, None, sizes, cache, target=target) as (engine, _):
        for prompt, ids in prompts.items():
            given = np.array(ids, np.int64)
            prefill = np.concatenate([rows.copy() for rows in engine.score(0, given)])
            followed = tokens.setdefault(prompt, [])
            steps = [prefill[-1]]
            for step in range(STEPS):
                if step == len(followed):
                    followed.append(int(steps[-1].argmax()))
                steps.append(engine.decode(0, followed[step], len(ids) + step).copy())
            found[prompt] = {"prefill": prefill, "decode": np.stack(steps[1:])}
    return found


def _reference(
    model: Model, prompts: Mapping[str, Sequence[int]], tokens: Mapping[str, Sequence[int]]
) -> Logits:
    """transformers' logits along the same tokens, from a child process."""
    whole = {str(n): [*prompts[p], *tokens[p]] for n, p in enumerate(prompts)}
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "prompts.npz", Path(folder) / "logits.npz"
        arrays: dict[str, Any] = {name: np.array(ids, np.int64) for name, ids in whole.items()}
        np.savez(given, **arrays)
        command = [sys.executable, "-m", "buddy_pipeline.launcher.reference"]
        run = subprocess.run(
            [*command, str(model.checkpoint.path), str(given), str(out)],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode != 0:
            last = next((t for t in reversed(run.stderr.splitlines()) if t.strip()), "no output")
            raise UserError(f"transformers cannot run {model.checkpoint.path}: {last}")
        logits = np.load(out)
        found: Logits = {}
        for number, prompt in enumerate(prompts):
            rows, count = logits[str(number)], len(prompts[prompt])
            found[prompt] = {"prefill": rows[:count], "decode": rows[count:]}
    return found


def _difference(ours: np.ndarray, other: np.ndarray) -> Difference:
    largest = float(np.abs(ours - other).max())
    return Difference(
        identical=bool(np.array_equal(ours, other)),
        largest=largest,
        relative=largest / max(float(np.abs(other).max()), 1e-30),
        same_tokens=bool((ours.argmax(1) == other.argmax(1)).all()),
    )
