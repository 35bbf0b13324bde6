"""A real model against tokens and logits that Hugging Face transformers gave in float32.

tests/data/smollm2_135m_f32.json has, for each prompt, 48 greedy tokens, how far the best logit was
above the second at each (`gaps`), and the ten best logits after the prompt.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import answer
from tests.jobs import ROOT
from tests.mpi.job import needs_mpi

RECORDS = {
    record["name"]: record
    for record in json.loads((ROOT / "tests/data/smollm2_135m_f32.json").read_text())
}
DECISIVE_GAP = 1e-3
"""Where the two best logits are nearer than this, either token is right."""
LOGIT_TOLERANCE = 1e-3

SPLITS = ("7,8,0,8,7", "0,15,0,0,15", "15,0,0,15,0", "0,0,30,0,0")
"""For five ranks: splits that leave ranks without a layer: in the middle, and at either end."""

pytestmark = pytest.mark.usefixtures("smollm2")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, dict[str, Any]]:
    """The answers of one rank, by record."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: ask(name, folder, cache, ranks=1) for name in RECORDS}


def ask(
    name: str,
    folder: Path,
    cache: Path,
    ranks: int,
    split: str | None = None,
    how: Sequence[object] = ("--spec", "smollm2-135m"),
) -> dict[str, Any]:
    record = RECORDS[name]
    if "messages" in record:
        messages = folder / "messages.json"
        messages.write_text(json.dumps(record["messages"]))
        prompt = ["--messages", messages]
    else:
        prompt = ["--raw", "--prompt", record["text"]]
    return answer(
        folder / f"{name}.json",
        *[*how, *prompt, "--ignore-eos", "--max-tokens", 48],
        *["--top-logits", 10, *(["--split", split] if split else [])],
        ranks=ranks,
        cache=cache,
    )


@pytest.mark.parametrize("name", RECORDS)
def test_tokens_and_logits_are_the_reference_s(name: str, alone: dict[str, Any]) -> None:
    record, given = RECORDS[name], alone[name]
    assert given["prompt_ids"] == record["prompt_ids"]
    for step, (token, expected) in enumerate(
        zip(given["token_ids"], record["greedy_ids"], strict=True)
    ):
        if record["gaps"][step] < DECISIVE_GAP and token != expected:
            break  # a tie: from here on the texts may differ
        assert token == expected, f"step {step}"
    else:
        assert given["text"] == record["greedy_text"]
    assert given["finish_reason"] == "length"
    assert [token for token, _ in given["top_logits"]] == [token for token, _ in record["top10"]]
    for (_, logit), (_, expected) in zip(given["top_logits"], record["top10"], strict=True):
        assert logit == pytest.approx(expected, abs=LOGIT_TOLERANCE)


@pytest.mark.parametrize("name", RECORDS)
def test_the_file_s_own_formats_give_the_same_bits_with_exact_activations(
    name: str, alone: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    """Q4_1 and Q8_0, computed on as they are: weights decoded in registers are the dequantised."""
    given = ask(name, tmp_path, cache, 1, how=["--spec", "smollm2-135m-gguf", "--exact"])
    for key in ("prompt_ids", "token_ids", "text", "finish_reason", "top_logits"):
        assert given[key] == alone[name][key]


@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "split", "names"),
    [
        (2, None, ["capital"]),
        (3, None, ["story"]),
        (4, None, list(RECORDS)),
        *((5, split, ["capital"]) for split in SPLITS),
        pytest.param(2, None, list(RECORDS), marks=pytest.mark.slow),
        pytest.param(3, None, list(RECORDS), marks=pytest.mark.slow),
        *(pytest.param(5, s, list(RECORDS), marks=pytest.mark.slow) for s in SPLITS),
    ],
)
def test_every_world_gives_the_same_bits(
    ranks: int,
    split: str | None,
    names: list[str],
    alone: dict[str, Any],
    tmp_path: Path,
    cache: Path,
) -> None:
    """So what holds for one rank against the reference holds for all worlds."""
    for name in names:
        given = ask(name, tmp_path, cache, ranks, split)
        for key in ("prompt_ids", "token_ids", "text", "finish_reason", "top_logits"):
            assert given[key] == alone[name][key], name
        assert len(given["stats"]["peak_memory_bytes"]) == ranks
