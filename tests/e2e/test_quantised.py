"""Models quantised ahead of time compute what they do when they are quantised while loading."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import VOCAB_SIZE, tiny_checkpoint
from tests.e2e.command import answer, buddy_pipeline
from tests.mpi.job import needs_mpi


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "spec.json"
    path.write_text("{}")
    return path


def ask(path: Path, spec: Path, model: Path, variant: str, cache: Path, ranks: int = 1) -> Any:
    given = answer(
        path,
        *["--spec", spec, "--local-model", model, "--variant", variant, "--raw"],
        *["--prompt", "abcdefgh", "--ignore-eos", "--max-tokens", 6, "--top-logits", VOCAB_SIZE],
        ranks=ranks,
        cache=cache,
    )
    return given["token_ids"], given["top_logits"]


def quantise(spec: Path, model: Path, variant: str, folder: Path, cache: Path) -> Path:
    ended = buddy_pipeline(
        *["quantize", "--spec", spec, "--local-model", model],
        *["--variant", variant, "--output", folder],
        cache=cache,
    )
    assert ended.code == 0, ended.stderr
    return folder


@pytest.mark.parametrize("variant", ["w8a8", "w8a16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts(family: str, variant: str, spec: Path, tmp_path: Path, cache: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", family)
    folder = quantise(spec, model, variant, tmp_path / "q", cache)
    at_load = ask(tmp_path / "a.json", spec, model, variant, cache)
    assert at_load == ask(tmp_path / "b.json", spec, folder, variant, cache)


@needs_mpi
@pytest.mark.mpi
def test_ranks_read_their_own_experts(spec: Path, tmp_path: Path, cache: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "mixtral")
    folder = quantise(spec, model, "w8a8", tmp_path / "q", cache)
    alone = ask(tmp_path / "a.json", spec, folder, "w8a8", cache)
    assert alone == ask(tmp_path / "b.json", spec, folder, "w8a8", cache, ranks=2)


@pytest.mark.parametrize("variant", ["w8a32", "w8a16", "w8a8"])
def test_a_table_that_is_the_head_of_any_width(
    variant: str, spec: Path, tmp_path: Path, cache: Path
) -> None:
    """60 elements, of which blocks of 32 leave four over."""
    model = tiny_checkpoint(tmp_path / "model", "qwen2")
    folder = quantise(spec, model, variant, tmp_path / "q", cache)
    at_load = ask(tmp_path / "a.json", spec, model, variant, cache)
    assert at_load == ask(tmp_path / "b.json", spec, folder, variant, cache)
    exact = dict(ask(tmp_path / "c.json", spec, model, "f32", cache)[1])
    quantised = dict(at_load[1])
    spread = max(exact.values()) - min(exact.values())
    differences = [abs(exact[token] - quantised[token]) for token in exact]
    assert 0 < max(differences) < 0.05 * spread
