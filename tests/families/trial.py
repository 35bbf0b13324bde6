"""One family tried: a tiny random model of it against transformers, through the product's path."""

import json
import os
import resource
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from tests.families.tiny_configs import PADDING, VOCABULARY, tiny_config

PROMPT, DECODED = 12, 4
#: Largest difference of a logit, as a part of the largest logit.
TOLERANCE = 1e-4
#: Of every matrix: large enough for logits that differ, and attention that is not uniform.
_SPREAD = 0.2


class Status(Enum):
    """What came of a trial."""

    PASSES = "passes"
    REFUSED = "refused"  # the product names what it cannot do
    DIFFERS = "differs"  # it runs, and its logits are others
    FAILED = "failed"  # an error that names nothing, a crash or a timeout
    OUTSIDE = "outside"  # no decoder-only language model


@dataclass(frozen=True)
class Outcome:
    """What came of a trial, and why where it does not pass."""

    status: Status
    reason: str = ""

    def to_json(self) -> dict[str, str]:
        """As plain data."""
        return {**asdict(self), "status": self.status.value}

    @staticmethod
    def from_json(data: dict[str, str]) -> "Outcome":
        """What `to_json` made."""
        return Outcome(Status(data["status"]), data["reason"])


def try_family(model_type: str, folder: Path, cache: Path) -> Outcome:
    """Makes a checkpoint in `folder`, runs it both ways and compares every logit.

    cache: a folder of compiled objects that trials share.
    """
    from buddy_pipeline.partition.errors import UserError

    config = tiny_config(model_type)
    ids = np.random.default_rng(1).integers(PADDING + 3, VOCABULARY, PROMPT + DECODED)
    expected = _reference(config, folder, ids)
    try:
        given = _ours(folder, ids, cache)
    except UserError as error:
        return Outcome(Status.REFUSED, str(error).replace(str(folder), "the checkpoint"))
    if not np.isfinite(given).all():
        return Outcome(Status.DIFFERS, "logits are not finite")
    apart = np.abs(given - expected).max(axis=1) / np.abs(expected).max()
    if apart.max() > TOLERANCE:
        first = int((apart > TOLERANCE).argmax())
        reason = f"logits are {apart.max():.0e} of the largest apart, from token {first} on"
        return Outcome(Status.DIFFERS, reason)
    return Outcome(Status.PASSES)


def _reference(config: Any, folder: Path, ids: np.ndarray) -> np.ndarray:
    """Writes a random checkpoint; transformers' logits after each token, float32 [tokens, vocab].

    Eager attention and no cache: no kernel and no cache of another's is part of the reference.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        saved = model.state_dict().keys()
        buffers = [
            b for name, b in model.named_buffers() if name in saved and b.is_floating_point()
        ]
        for parameter in [*model.parameters(), *buffers]:
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)  # around the neutral value of a norm or a bias
            else:
                parameter.copy_(_SPREAD * noise)
        logits = model(torch.as_tensor(ids)[None], use_cache=False).logits[0].float().numpy()
    model.save_pretrained(folder)
    if not np.isfinite(logits).all() or np.abs(logits - logits[0]).max() == 0:
        raise ValueError("transformers' own logits are not finite, or the same for every token")
    return logits


def _ours(folder: Path, ids: np.ndarray, cache_folder: Path) -> np.ndarray:
    """Our logits after each token: the prompt at once, the rest one by one."""
    from buddy_pipeline.compile.cache import Cache
    from buddy_pipeline.compile.target import host_target
    from buddy_pipeline.launcher.loading import StepSizes, open_engine
    from buddy_pipeline.launcher.model import open_model
    from buddy_pipeline.launcher.settings import ModelSettings

    spec = folder / "spec.json"
    spec.write_text("{}")
    model = open_model(ModelSettings(spec=str(spec), local_model=folder))
    cache = Cache.open(cache_folder)
    _compile_here(model, host_target(), cache)
    rows = []
    sizes = StepSizes(tokens=PROMPT, rows=PROMPT, slots=1)
    with open_engine(model, 1, sizes, cache) as (engine, _):
        rows += [part.copy() for part in engine.score(0, ids[:PROMPT])]
        for position in range(PROMPT, len(ids)):
            rows.append(engine.decode(0, int(ids[position]), position)[None].copy())
    return np.concatenate(rows)


def _compile_here(model: Any, target: Any, cache: Any) -> None:
    """Fills the cache in this process, with what workers run; starting those takes longer than all
    the rest of a trial, and a trial is a process of its own already."""
    from buddy_pipeline.compile.manifest import Plan
    from buddy_pipeline.compile.versions import plan_key
    from buddy_pipeline.compile.worker import handle

    common = {"cache": str(cache.root), "target": asdict(target)}
    config, variant = model.checkpoint.config, model.formats
    key = plan_key(config, variant, target, model.granularity)
    request = {"kind": "plan", "key": key, "config": config, "variant": asdict(variant)}
    handle({**common, **request, **asdict(model.granularity)}, lambda note: None)
    text = cache.read_plan(key)
    assert text is not None
    plan = Plan.from_json(text)
    for missing in _missing(plan.objects(plan.partitions), cache):
        handle({**common, "kind": "object", "key": missing}, lambda note: None)


def _missing(keys: Iterable[str], cache: Any) -> list[str]:
    return [key for key in keys if cache.read_object(key) is None]


def main(model_type: str, folder: Path, cache: Path) -> None:
    """The trial of one family in a process of its own; leaves `outcome.json` in its folder, and
    what compilers print in `log.txt`."""
    from buddy_pipeline.compile.worker import MEMORY_LIMIT

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, resource.RLIM_INFINITY))
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        outcome = try_family(model_type, folder, cache)
    except Exception as error:
        # Whatever goes wrong is what the sweep is here to tell.
        traceback.print_exc()
        outcome = Outcome(Status.FAILED, " ".join(f"{type(error).__name__}: {error}".split())[:200])
    (folder / "outcome.json").write_text(json.dumps(outcome.to_json()))
