"""Tiny random models of many families: every logit against transformers in float32."""

import sys
from collections.abc import Callable
from functools import cache as once
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import VOCAB_SIZE, Reference, reference_logits
from tests.e2e.command import buddy_pipeline
from tests.e2e.logits import NEW_TOKENS
from tests.jobs import ROOT
from tests.mpi.job import needs_mpi

TOLERANCE = 1e-4
PROMPT = np.random.default_rng(1).integers(0, VOCAB_SIZE, 40)

Checkpoints = Callable[..., Path]

_SIZES: dict[str, Any] = {
    "hidden_size": 60,
    "intermediate_size": 101,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
}

MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "qwen2"},
    "llama": {"family": "llama", "max_shard_size": "200KB"},
    "qwen3": {"family": "qwen3"},
    "mistral": {"family": "mistral"},
    "gemma2": {"family": "gemma2"},
    "gpt2": {"family": "gpt2", "max_shard_size": "60KB"},
    "qwen3_moe": {"family": "qwen3_moe", "max_shard_size": "200KB"},
    # Halves of one matrix in whole panels, which the linear joins itself.
    "phi3-panels": {"family": "phi3", **_SIZES, "intermediate_size": 96, "pad_token_id": None},
}
SLOW_MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral"},
    "olmoe": {"family": "olmoe", "as_published": False},
    "qwen2-untied": {"family": "qwen2", "tie_word_embeddings": False},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "gpt2-untied": {"family": "gpt2", "tie_word_embeddings": False},
    "olmo2": {"family": "olmo2", **_SIZES},
    "granite": {
        "family": "granite",
        **_SIZES,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "starcoder2": {"family": "starcoder2", **_SIZES, "sliding_window": 13},
    "gpt_neox": {"family": "gpt_neox", **_SIZES, "rotary_pct": 0.5},
    "phi3": {"family": "phi3", **_SIZES, "pad_token_id": None},
    "gemma3_text": {"family": "gemma3_text", **_SIZES, "head_dim": 22, "sliding_window": 11},
}
DAILY_PAIRS = ("llama", "gpt2", "qwen3_moe")
"""Models that run on two ranks in every test run; the others do every night."""


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Callable[[str], tuple[Path, Reference]]:
    """`model(name)`: a checkpoint of the models above and what transformers computes from it."""

    @once
    def make(name: str) -> tuple[Path, Reference]:
        path = checkpoint(**{**MODELS, **SLOW_MODELS}[name])
        return path, reference_logits(path, PROMPT, NEW_TOKENS)

    return make


def cases() -> list[Any]:
    """(name, ranks): all models alone, and on two ranks."""
    found = []
    for name in (*MODELS, *SLOW_MODELS):
        slow = [pytest.mark.slow]
        found.append(pytest.param(name, 1, marks=slow if name in SLOW_MODELS else []))
        pair = [] if name in DAILY_PAIRS else slow
        found.append(pytest.param(name, 2, marks=[pytest.mark.mpi, needs_mpi, *pair]))
    return found


@pytest.mark.parametrize(("name", "ranks"), cases())
def test_logits_are_those_of_transformers(
    name: str,
    ranks: int,
    model: Callable[[str], tuple[Path, Reference]],
    tmp_path: Path,
    cache: Path,
) -> None:
    path, reference = model(name)
    np.save(tmp_path / "prompt.npy", PROMPT)
    if "max_shard_size" in MODELS.get(name, {}):
        assert len(list(path.glob("model-*.safetensors"))) > 1
    ended = buddy_pipeline(
        *[path, cache, tmp_path / "prompt.npy", tmp_path / "out.npz"],
        ranks=ranks,
        command=[sys.executable, ROOT / "tests/e2e/logits.py"],
    )
    assert ended.code == 0, ended.stderr
    given = np.load(tmp_path / "out.npz")
    np.testing.assert_allclose(given["prompt"], reference.prompt, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(given["steps"], reference.steps, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(given["tokens"], reference.tokens)
    # Whatever the chunks: the prompt in one piece gives the bits of one token at a time.
    np.testing.assert_array_equal(given["last"], given["prompt"][-1])
