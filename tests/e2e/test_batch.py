"""Many prompts at once through the command line: the answers are those of each alone."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import TIMEOUT_S, buddy_pipeline, refusal, start
from tests.jobs import end, eventually
from tests.mpi.job import needs_mpi

pytestmark = pytest.mark.usefixtures("smollm2")

COMMON = (
    "The harbour lay quiet in the morning light, and along the long stone quay the first of the "
    "boats had begun to unload while gulls wheeled and cried above the masts. "
)
TEXTS = [COMMON + more for more in ("The old", "A child", "Nobody")] + [
    "Once",
    "Seven times eight is",
]
LINES = [
    {"id": i, "prompt": text, "raw": True, "max_tokens": 14 + 9 * i, "ignore_eos": True}
    | ({"temperature": 0.8, "top_p": 0.9, "seed": i} if i % 2 else {"top_logits": 5})
    for i, text in enumerate(TEXTS)
]
TIGHT = {"max_token_len": 96, "tiered_kv_cache": {"enabled": True, "cache_sizes": [32, 64]}}
"""With room for one full sequence, so that others wait, and running ones start again."""
TIGHT_MEMORY = "5M"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    path = tmp_path_factory.mktemp("spec") / "tight.json"
    path.write_text(json.dumps({"hf_model_path": str(smollm2), "variant": "f32", **TIGHT}))
    return path


def batch(
    folder: Path, cache: Path, lines: list[Any], *more: object, ranks: int = 1
) -> dict[Any, Any]:
    """The results of these lines by id, without their times."""
    given, results = folder / "in.jsonl", folder / "out.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results.unlink(missing_ok=True)
    ended = buddy_pipeline(
        "batch", "--input", given, "--output", results, *more, ranks=ranks, cache=cache
    )
    assert (ended.code, ended.stdout) == (0, ""), ended.stderr
    found = {}
    for text in results.read_text().splitlines():
        line = json.loads(text)
        line["reused"] = line.pop("stats")["reused_prompt_tokens"]
        found[line.pop("id")] = line
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, spec: Path, cache: Path) -> dict[Any, Any]:
    """The results of one sequence at a time on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    found = batch(folder, cache, LINES, "--spec", spec, "--max-sequences", 1)
    assert len(found) == len(LINES)
    return found


def without_reuse(found: dict[Any, Any]) -> dict[Any, Any]:
    return {
        id: {key: value for key, value in line.items() if key != "reused"}
        for id, line in found.items()
    }


@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_answers_do_not_depend_on_what_runs_beside_them_or_on_the_ranks(
    ranks: int, alone: dict[Any, Any], tmp_path: Path, spec: Path, cache: Path
) -> None:
    """Tokens, texts and logits, exactly."""
    found = batch(tmp_path, cache, LINES, "--spec", spec, ranks=ranks)
    assert without_reuse(found) == without_reuse(alone)
    assert found[1]["reused"] >= 32
    assert found[2]["reused"] >= 32


@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_cache_makes_sequences_wait(
    ranks: int, alone: dict[Any, Any], tmp_path: Path, spec: Path, cache: Path
) -> None:
    memory = ["--kv-memory", TIGHT_MEMORY if ranks == 1 else "2.5M"]
    found = batch(tmp_path, cache, LINES, "--spec", spec, *memory, ranks=ranks)
    assert without_reuse(found) == without_reuse(alone)


def test_too_little_memory_for_one_sequence_is_one_line(
    tmp_path: Path, spec: Path, cache: Path
) -> None:
    ended = buddy_pipeline(
        *["run", "--spec", spec, "--prompt", "x", "--raw", "--kv-memory", "1M"], cache=cache
    )
    assert ended.code == 2
    assert "room for 21 tokens, but one sequence may have 96: raise --kv-memory" in ended.stderr


@needs_mpi
@pytest.mark.mpi
def test_an_interrupted_batch_goes_on_where_it_was(
    alone: dict[Any, Any], tmp_path: Path, spec: Path, cache: Path
) -> None:
    given, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    arguments = ["batch", "--spec", spec, "--input", given, "--output", results]
    job = start(*arguments, "--max-sequences", 1, ranks=2, cache=cache)
    try:
        assert eventually(
            lambda: results.exists() and results.read_bytes().count(b"\n") > 0, TIMEOUT_S
        )
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=10)
    finally:
        end(job)
    assert job.returncode != 0
    before = results.read_text()
    assert 0 < before.count("\n") < len(LINES)
    ended = buddy_pipeline(*arguments, cache=cache)
    assert ended.code == 0, ended.stderr
    assert results.read_text().startswith(before)
    ids = [json.loads(text)["id"] for text in results.read_text().splitlines()]
    assert sorted(ids) == sorted(alone)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=[pytest.mark.mpi, needs_mpi])])
def test_limits_that_ask_for_more_memory_than_there_is_are_named(
    ranks: int, spec: Path, cache: Path, tmp_path: Path
) -> None:
    given = tmp_path / "in.jsonl"
    given.write_text(json.dumps(LINES[0]) + "\n")
    most = 65_536
    options = ["--max-sequences", most, "--prefill-chunk", most, "--microbatches", most]
    ended = buddy_pipeline(
        *("batch", "--spec", spec, "--input", given, "--output", tmp_path / "out.jsonl", *options),
        ranks=ranks,
        cache=cache,
    )
    assert f"lower --max-sequences {most} to " in refusal(ended)
