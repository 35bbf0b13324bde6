"""What a run leaves behind: the stream, the statistics, the JSON file."""

import io
import json
import os
from pathlib import Path

import pytest

from buddy_pipeline.launcher.output import (
    Result,
    Statistics,
    TextStream,
    write_json,
)
from buddy_pipeline.launcher.paths import check_writable
from buddy_pipeline.partition.errors import UserError

STATISTICS = Statistics(
    prompt_tokens=37,
    prompt_tokens_per_s=500.04,
    reused_prompt_tokens=5,
    generation_tokens=48,
    generation_tokens_per_s=61.26,
    time_to_first_token_s=0.074,
    peak_memory_bytes=[812_400_000, 99_600_000],
)
RESULT = Result(
    prompt_ids=[1, 2],
    token_ids=[3],
    text="é",
    finish_reason="eos",
    stats=STATISTICS,
    top_logits=(),
)


def test_the_statistics_are_one_line() -> None:
    assert STATISTICS.line() == (
        "prompt 37 tokens, 500.0 tokens/s | generation 48 tokens, 61.3 tokens/s"
        " | first token after 0.074 s | peak memory by rank 812, 100 MB"
    )


def test_one_token_has_no_generation_rate() -> None:
    line = Statistics(1, 1.0, 0, 1, None, 1.0, [0]).line()
    assert "generation 1 token, - tokens/s" in line


def test_the_json_file_has_the_fields_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, RESULT)
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "prompt_ids": [1, 2],
        "token_ids": [3],
        "text": "é",
        "finish_reason": "eos",
        "stats": {
            "prompt_tokens": 37,
            "prompt_tokens_per_s": 500.04,
            "reused_prompt_tokens": 5,
            "generation_tokens": 48,
            "generation_tokens_per_s": 61.26,
            "time_to_first_token_s": 0.074,
            "peak_memory_bytes": [812_400_000, 99_600_000],
        },
    }


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    def full_disk(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(UserError, match=r"out\.json cannot be written: No space left"):
        write_json(path, RESULT)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    check_writable("--json", tmp_path / "out.json")
    for path in (tmp_path, tmp_path / "none" / "out.json"):
        with pytest.raises(UserError, match=r"--json .* cannot be written"):
            check_writable("--json", path)


def test_a_terminal_without_unicode_gets_a_question_mark() -> None:
    raw = io.BytesIO()
    stream = TextStream(io.TextIOWrapper(raw, encoding="ascii"))
    stream.write("aé")
    assert raw.getvalue() == b"a?"
