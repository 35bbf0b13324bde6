"""buddy-mlir's own spec files run as they are, on a tiny model in place of DeepSeek's."""

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from buddy_pipeline.ranks.checkpoint import open_checkpoint
from tests.e2e.command import answer, buddy_pipeline, refusal
from tests.launcher.buddy_specs import BUDDY_SPECS

DAILY = "f32_tiered_kv_cache"
"""The spec that runs in every test run; the others run every night."""
ROTARY_FREQUENCIES = 6
"""Half of the tiny model's head, 60 / 5 elements."""


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    """A tiny model of DeepSeek R1 Distill Qwen's architecture, for as many tokens."""
    return checkpoint("qwen2", tie_word_embeddings=False, max_position_embeddings=1024)


def ask(folder: Path, spec: dict[str, Any], model: Path) -> list[object]:
    (folder / "spec.json").write_text(json.dumps(spec))
    return ["--spec", folder / "spec.json", "--local-model", model, "--prompt", "One, two, three"]


@pytest.mark.parametrize("name", BUDDY_SPECS)
def test_a_model_of_another_size_is_refused_with_both_counts(
    name: str, model: Path, cache: Path, tmp_path: Path
) -> None:
    ended = buddy_pipeline(*ask(tmp_path, BUDDY_SPECS[name], model), cache=cache)
    assert "weights_override.total is 1,777,088,064, but" in refusal(ended)


@pytest.mark.parametrize(
    "name",
    [DAILY, *(pytest.param(n, marks=pytest.mark.slow) for n in BUDDY_SPECS if n != DAILY)],
)
def test_a_spec_gives_the_answer_of_its_variant_alone(
    name: str, model: Path, cache: Path, tmp_path: Path
) -> None:
    parameters = sum(prod(t.shape) for t in open_checkpoint(model).tensors.values())
    spec = BUDDY_SPECS[name]
    counts = {**spec["weights_override"], "total": parameters + ROTARY_FREQUENCIES}

    def tokens(spec: dict[str, Any]) -> list[int]:
        options = ["--max-tokens", 30, "--ignore-eos"]
        result = answer(tmp_path / "out.json", *ask(tmp_path, spec, model), *options, cache=cache)
        found: list[int] = result["token_ids"]
        return found

    plain = {"variant": spec["variant"], "max_token_len": 1024}
    assert tokens({**spec, "weights_override": counts}) == tokens(plain)
