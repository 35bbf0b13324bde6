"""GGUF files computed on as they are: several formats in one file; what does not go together."""

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from tests.checkpoints import tiny_checkpoint
from tests.e2e.command import answer, buddy_pipeline, refusal
from tests.mpi.job import needs_mpi
from tests.ranks.checkpoint.gguf_models import random_model, write_gguf

Q = GGMLQuantizationType
#: By texts in the names of tensors: every format, different ones side by side on one input.
MIXED = {
    "blk.0.attn_q": Q.Q4_K,
    "blk.0.attn_v": Q.Q6_K,
    "blk.0.ffn_gate": Q.Q5_0,
    "blk.0.ffn_up": Q.Q5_1,
    "blk.0.ffn_down": Q.Q5_K,
    "blk.1.attn_q": Q.BF16,
    "blk.1.attn_k": Q.F16,
    "blk.1.ffn_down": Q.Q4_1,
    "token_embd": Q.Q6_K,
}
ALL_LOGITS = 288


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "spec.json"
    path.write_text("{}")
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "mixed.gguf"
    return write_gguf(path, "llama_wide", random_model("llama_wide"), Q.Q4_0, MIXED)


def ask(path: Path, spec: Path, model: Path, cache: Path, *options: str, ranks: int = 1) -> Any:
    given = answer(
        path,
        *["--spec", spec, "--local-model", model, *options, "--raw", "--prompt", "abcdefgh"],
        *["--ignore-eos", "--max-tokens", 8, "--top-logits", ALL_LOGITS],
        ranks=ranks,
        cache=cache,
    )
    return given["prompt_ids"], given["token_ids"], given["top_logits"]


def test_many_formats_in_one_file_are_exact(
    mixed: Path, spec: Path, tmp_path: Path, cache: Path
) -> None:
    exact = ask(tmp_path / "a.json", spec, mixed, cache, "--variant", "gguf", "--exact")
    assert exact == ask(tmp_path / "b.json", spec, mixed, cache, "--variant", "f32")


def test_matrices_that_hugging_face_has_transposed_are_exact(
    spec: Path, tmp_path: Path, cache: Path
) -> None:
    model = write_gguf(tmp_path / "gpt2.gguf", "gpt2", random_model("gpt2"), Q.Q4_0)
    exact = ask(tmp_path / "a.json", spec, model, cache, "--variant", "gguf", "--exact")
    assert exact == ask(tmp_path / "b.json", spec, model, cache, "--variant", "f32")


@needs_mpi
@pytest.mark.mpi
def test_every_world_gives_the_same_bits(
    mixed: Path, spec: Path, tmp_path: Path, cache: Path
) -> None:
    alone = ask(tmp_path / "a.json", spec, mixed, cache, "--variant", "gguf")
    assert alone == ask(tmp_path / "b.json", spec, mixed, cache, "--variant", "gguf", ranks=2)


#: Of each layer's experts, different ones; rows of 64 and 96 elements.
EXPERTS = {
    "blk.0.ffn_down_exps": Q.Q8_0,
    "blk.1.ffn_gate_exps": Q.Q5_1,
    "blk.1.ffn_up_exps": Q.Q5_1,
}


@pytest.mark.parametrize("case", ["mixtral", "qwen3moe"])
def test_experts_are_exact(case: str, spec: Path, tmp_path: Path, cache: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", case, random_model(case), Q.Q4_0, EXPERTS)
    exact = ask(tmp_path / "a.json", spec, model, cache, "--variant", "gguf", "--exact")
    assert exact == ask(tmp_path / "b.json", spec, model, cache, "--variant", "f32")


@needs_mpi
@pytest.mark.mpi
def test_experts_of_every_world_give_the_same_bits(spec: Path, tmp_path: Path, cache: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", "mixtral", random_model("mixtral"), Q.Q4_0, EXPERTS)
    alone = ask(tmp_path / "a.json", spec, model, cache, "--variant", "gguf")
    assert alone == ask(tmp_path / "b.json", spec, model, cache, "--variant", "gguf", ranks=2)


def test_int8_activations_change_logits_a_little(
    mixed: Path, spec: Path, tmp_path: Path, cache: Path
) -> None:
    exact = ask(tmp_path / "a.json", spec, mixed, cache, "--variant", "gguf", "--exact")
    rounded = ask(tmp_path / "b.json", spec, mixed, cache, "--variant", "gguf")
    before, after = dict(exact[2]), dict(rounded[2])
    spread = max(before.values()) - min(before.values())
    differences = [abs(before[token] - after[token]) for token in before]
    assert 0 < max(differences) < 0.05 * spread


def test_a_directory_has_no_formats_of_its_own(spec: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama")
    ended = buddy_pipeline(
        "--spec", spec, "--local-model", model, "--variant", "gguf", "--prompt", "a"
    )
    assert "is a directory: give a .gguf file with --local-model" in refusal(ended)


def test_exact_is_for_gguf(mixed: Path, spec: Path) -> None:
    ended = buddy_pipeline("--spec", spec, "--local-model", mixed, "--exact", "--prompt", "a")
    assert "this is f32: add --variant gguf, or leave --exact out" in refusal(ended)
