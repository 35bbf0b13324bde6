"""The command line on a tiny model: what each option does to text, statistics and JSON."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.command import answer, buddy_pipeline, is_progress
from tests.mpi.job import needs_mpi

OBJECTS_OF_LLAMA = 8
"""Driver, positions, embedding and its kernel, layer, linear, attention, head."""


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    """The folder of a tiny model with a spec beside it."""
    path = checkpoint("llama")
    (path / "spec.json").write_text(json.dumps({"hf_model_path": str(path)}))
    return path


def ask(model: Path, *more: object) -> list[object]:
    return ["--spec", model / "spec.json", "--max-tokens", 12, *more]


def test_text_statistics_and_json_agree(model: Path, cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    more = ["--prompt", "Hello", "--ignore-eos", "--json", path, "--top-logits", 3]
    answer(path, *ask(model, "--prompt", "Hello"), cache=cache)  # fills the cache
    ended = buddy_pipeline(*ask(model, *more), cache=cache)
    assert ended.code == 0
    result = json.loads(path.read_text())
    assert set(result) == {
        *("prompt_ids", "token_ids", "text", "finish_reason", "stats", "top_logits")
    }
    assert set(result["stats"]) == {
        *("prompt_tokens", "prompt_tokens_per_s", "generation_tokens", "generation_tokens_per_s"),
        *("time_to_first_token_s", "peak_memory_bytes", "reused_prompt_tokens"),
    }
    assert ended.stdout == result["text"] + "\n"
    assert re.fullmatch(
        r"prompt \d+ tokens, \d+\.\d tokens/s \| generation 12 tokens, \d+\.\d tokens/s"
        r" \| first token after \d+\.\d{3} s \| peak memory by rank \d+ MB\n",
        ended.stderr,
    )
    assert result["stats"]["generation_tokens"] == len(result["token_ids"]) == 12
    assert result["stats"]["prompt_tokens"] == len(result["prompt_ids"])
    assert result["finish_reason"] == "length"
    logits = [logit for _, logit in result["top_logits"]]
    assert logits == sorted(logits, reverse=True) and len(logits) == 3
    assert result["top_logits"][0][0] == result["token_ids"][0]


def test_a_stop_text_ends_the_answer_before_it(model: Path, cache: Path, tmp_path: Path) -> None:
    whole = answer(tmp_path / "a.json", *ask(model, "--prompt", "Hello"), cache=cache)
    stop = whole["text"][3:5]
    cut = answer(tmp_path / "b.json", *ask(model, "--prompt", "Hello", "--stop", stop), cache=cache)
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=[pytest.mark.mpi, needs_mpi])])
def test_a_seed_decides_the_text(ranks: int, model: Path, cache: Path, tmp_path: Path) -> None:
    def sample(seed: int, ranks: int) -> list[int]:
        more = ["--prompt", "Hello", "--temperature", 1, "--seed", seed, "--ignore-eos"]
        result = answer(tmp_path / "out.json", *ask(model, *more), ranks=ranks, cache=cache)
        ids: list[int] = result["token_ids"]
        return ids

    assert sample(1, ranks) == sample(1, 1)
    assert sample(2, ranks) != sample(1, 1)


def test_ways_to_give_a_prompt(model: Path, cache: Path, tmp_path: Path) -> None:
    def prompt_of(*more: object) -> list[int]:
        result = answer(tmp_path / "out.json", *ask(model, *more), cache=cache)
        ids: list[int] = result["prompt_ids"]
        return ids

    (tmp_path / "prompt.txt").write_text("Hi\n")
    (tmp_path / "messages.json").write_text(
        json.dumps([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    )
    # A token is a byte.
    templated = prompt_of("--prompt", "Hi")
    assert len(templated) == len("user: Hi\nassistant: ")
    assert prompt_of("--prompt-file", tmp_path / "prompt.txt") == templated
    messages = prompt_of("--messages", tmp_path / "messages.json")
    assert len(messages) == len("system: S\nuser: U\nassistant: ")
    assert prompt_of("--prompt", "Hi", "--raw") == templated[len("user: ") :][:2]


def test_compile_says_what_it_built_and_what_was_there(model: Path, tmp_path: Path) -> None:
    words = ["compile", "--spec", model / "spec.json", "--rank", 1, "--world", 2]
    first = buddy_pipeline(*words, cache=tmp_path / "cache")
    assert first.code == 0
    assert first.stdout.startswith("rank 1 of 2 (FIRST), layers [0, 2), for ")
    built = first.stdout.count(": built in ")
    assert f"{built} objects built, 0 from the cache: " in first.stdout
    assert built == len(list(tmp_path.glob("cache/objects/*"))) > 0

    again = buddy_pipeline(*words, cache=tmp_path / "cache")
    assert "graph: from the cache" in again.stdout
    assert f"0 objects built, {built} from the cache: " in again.stdout


def test_verify_reports_the_whole_graph(model: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = ["verify", "--spec", model / "spec.json", "--world", 2, "--report", report]
    ended = buddy_pipeline(*words)
    assert ended.code == 0
    content = json.loads(report.read_text())
    assert content["ok"] and content["order_ok"]
    assert content["missing"] == content["duplicate"] == content["violations"] == []


@needs_mpi
@pytest.mark.mpi
def test_ranks_that_start_cold_build_each_object_once(model: Path, tmp_path: Path) -> None:
    cold = tmp_path / "cache"
    prompt = ["--prompt", "Hello", "--no-stats"]
    ended = buddy_pipeline(*ask(model, *prompt), ranks=3, cache=cold)
    assert ended.code == 0
    # One rank shows progress, and nothing else is printed.
    assert ended.stderr.count("exported and planned") == 1
    assert all(is_progress(line) for line in ended.stderr.splitlines() if line)
    assert len(list(cold.glob("plans/*.graph.json"))) == 1
    assert len(list(cold.glob("objects/*.bpo"))) == OBJECTS_OF_LLAMA
    shutil.rmtree(cold / "sources")  # a second run needs none of it
    warm = buddy_pipeline(*ask(model, *prompt), ranks=3, cache=cold)
    assert (warm.code, warm.stdout, warm.stderr) == (0, ended.stdout, "")
