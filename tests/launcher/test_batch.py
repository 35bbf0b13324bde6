"""The batch command: every good line has one result, whatever is wrong with others or was done."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from buddy_pipeline.launcher import api, batch, cli
from buddy_pipeline.launcher.batch_lines import Line, finished, read_lines
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.sampling import SamplingOptions
from tests.launcher.fakes import FakeSession, FakeTokenizer, scripted

GOOD = [
    {"id": 1, "prompt": "one", "raw": True},
    {"id": "two", "prompt": "two"},
    {"id": 3, "messages": [{"role": "user", "content": "three"}], "max_tokens": 2},
    {"id": 4, "prompt": "four", "stop": "ll", "top_logits": 2},
]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    fake = FakeSession(scripted("Hello"))
    monkeypatch.setattr(api, "open_session", fake.open)
    return fake


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))


def results(path: Path) -> dict[Any, dict[str, Any]]:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    by_id = {line["id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


def run(paths: tuple[Path, Path], *more: str) -> int:
    arguments = ["batch", "--spec", "s", "--input", str(paths[0]), "--output", str(paths[1])]
    return cli.main([*arguments, *more])


def test_every_line_has_its_result(
    session: FakeSession, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(paths[0], [*GOOD[:2], "", *GOOD[2:]])
    assert run(paths) == 0
    found = results(paths[1])
    assert {id: line["text"] for id, line in found.items()} == {
        1: "Hello",
        "two": "Hello",
        3: "He",
        4: "He",
    }
    assert bytes(found[1]["prompt_ids"]) == b"one"
    assert bytes(found[3]["prompt_ids"]) == b"[user]three"
    assert found[3]["finish_reason"] == "length"
    assert found[4]["finish_reason"] == "stop"
    assert found[4]["top_logits"][0] == [ord("H"), 9.0]
    assert "top_logits" not in found[1]
    assert found[1]["stats"]["generation_tokens"] == 6
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "4 results | prompts" in printed.err


def test_options_reach_the_pipeline(session: FakeSession, paths: tuple[Path, Path]) -> None:
    write(paths[0], GOOD)
    options = "--max-sequences 5 --microbatches 3 --prefill-chunk 7 --kv-memory 1.5G"
    assert run(paths, *options.split(), "--step-timeout", "2.5") == 0
    settings = session.settings
    assert (settings.max_sequences, settings.microbatches, settings.prefill_chunk) == (5, 3, 7)
    assert (settings.kv_memory_bytes, settings.step_timeout_s) == (1_500_000_000, 2.5)


def test_what_is_done_is_not_done_again(session: FakeSession, paths: tuple[Path, Path]) -> None:
    write(paths[0], GOOD[:2])
    assert run(paths) == 0
    before = paths[1].read_text()
    assert session.engine is not None
    session.engine.seen.clear()
    write(paths[0], GOOD)
    assert run(paths) == 0
    assert paths[1].read_text().startswith(before)
    assert set(results(paths[1])) == {1, "two", 3, 4}
    assert len(session.engine.seen) == 2


def test_a_line_whose_prompt_has_changed_is_named(
    session: FakeSession, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(paths[0], GOOD[:2])
    assert run(paths) == 0
    before = paths[1].read_text()
    write(paths[0], [{**GOOD[0], "prompt": "another"}, GOOD[1]])
    assert run(paths) == 1
    assert "line 1: id 1 is done in the output, for another prompt: " in capsys.readouterr().err
    assert paths[1].read_text() == before


def test_a_running_batch_has_its_output_alone(
    session: FakeSession, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(paths[0], GOOD)
    assert run(paths) == 0
    with open(paths[1]) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert run(paths) == 2
    assert "out.jsonl is that of a batch that is running: give" in capsys.readouterr().err
    assert run(paths) == 0


def test_a_full_disk_is_one_line_and_keeps_whole_results(
    session: FakeSession,
    paths: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    room = 300

    class Small(FileIO):
        def write(self, data: Any) -> int:
            nonlocal room
            if room == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = super().write(data[:room])
            room -= written
            return written

    write(paths[0], GOOD)
    with monkeypatch.context() as patched:
        patched.setattr(batch, "FileIO", Small)
        assert run(paths) == 2
    assert "cannot be written: No space left on device; make room and" in capsys.readouterr().err
    assert run(paths) == 0
    assert set(results(paths[1])) == {1, "two", 3, 4}


def test_a_line_that_an_interruption_cut_off_is_done_again(
    session: FakeSession, paths: tuple[Path, Path]
) -> None:
    write(paths[0], GOOD)
    assert run(paths) == 0
    whole = paths[1].read_text()
    paths[1].write_text(whole[:-20])
    assert run(paths) == 0
    assert paths[1].read_text().count("\n") == 4
    assert set(results(paths[1])) == {1, "two", 3, 4}


def test_an_interruption_leaves_whole_lines(session: FakeSession, paths: tuple[Path, Path]) -> None:
    write(paths[0], GOOD)
    assert session.engine is not None
    advance = session.engine.advance

    def interrupted() -> Any:
        if session.engine is not None and session.engine.finished:
            raise SystemExit(130)
        return advance()

    session.engine.advance = interrupted  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        run(paths)
    assert 1 <= len(results(paths[1])) < 4


def test_bad_lines_are_named_and_passed_over(
    session: FakeSession, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(paths[0], [GOOD[0], "{", {"id": 9}, GOOD[1]])
    assert run(paths) == 1
    assert set(results(paths[1])) == {1, "two"}
    errors = capsys.readouterr().err
    assert "buddy-pipeline: error: line 2: not valid JSON" in errors
    assert "buddy-pipeline: error: line 3: give either prompt or messages" in errors
    assert "2 results, 2 bad lines skipped" in errors


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "a JSON list: give an object"),
        ({"prompt": "x"}, "id is None: give a text or a whole number"),
        ({"id": True, "prompt": "x"}, "id is True"),
        ({"id": 1, "prompt": "x"}, "id 1 is that of line 1: give each its own"),
        ({"id": "\ud800", "prompt": "x"}, r"id is '\ud800', which is not Unicode text"),
        ({"id": 5, "prompt": "x", "temperature": 10**400}, "it must be a finite number"),
        ({"id": 5, "promt": "x"}, "unknown key 'promt': did you mean 'prompt'?"),
        ({"id": 5, "prompt": "x", "messages": []}, "give either prompt or messages"),
        ({"id": 5, "prompt": 3}, "prompt is 3: give a text"),
        ({"id": 5, "prompt": ""}, "the prompt is empty"),
        ({"id": 5, "prompt": "\ud800", "raw": True}, "not a character of Unicode"),
        ({"id": 5, "prompt": "x" * 200}, "206 tokens, but the context holds 100"),
        ({"id": 5, "messages": []}, "messages must hold a list of messages"),
        ({"id": 5, "messages": [{"role": "user"}]}, "content of message 0 is None"),
        ({"id": 5, "messages": [3], "raw": True}, "raw and messages exclude each other"),
        ({"id": 5, "prompt": "x", "raw": 1}, "raw is 1: it must be true or false"),
        ({"id": 5, "prompt": "x", "max_tokens": "9"}, "max_tokens is '9': it must be a whole"),
        ({"id": 5, "prompt": "x", "max_tokens": True}, "max_tokens is True"),
        ({"id": 5, "prompt": "x", "max_tokens": 0}, "max_tokens is 0: it must be at least 1"),
        ({"id": 5, "prompt": "x", "temperature": "hot"}, "temperature is 'hot': it must be a num"),
        ({"id": 5, "prompt": "x", "seed": 1.5}, "seed is 1.5: it must be a whole number or null"),
        ({"id": 5, "prompt": "x", "stop": [1]}, "stop is [1]: it must be a text or a list"),
        ({"id": 5, "prompt": "x", "top_logits": -1}, "top_logits is -1: it must be 0 or more"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(line: Any, message: str) -> None:
    texts = [json.dumps(GOOD[0]), line if isinstance(line, str) else json.dumps(line)]
    _, bad = read(texts)
    assert isinstance(bad, UserError)
    assert str(bad).startswith("line 2: ")
    assert message in str(bad)


def read(texts: list[str]) -> Iterator[Line | UserError]:
    return read_lines(texts, FakeTokenizer(), 100, {})  # type: ignore[arg-type]


def test_sampling_options_have_the_names_of_the_command_line() -> None:
    options = {
        "max_tokens": 3,
        "temperature": 1,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "repeat_last_n": -1,
        "seed": 7,
        "stop": ["a", "b"],
        "ignore_eos": True,
    }
    (line,) = read([json.dumps({"id": 1, "prompt": "x", **options})])
    assert isinstance(line, Line)
    assert line.request.sampling == SamplingOptions(
        3, 1.0, 4, 0.9, 0.1, 1.1, -1, 7, ("a", "b"), ignore_eos=True
    )


@pytest.mark.parametrize("content", ["notes\n", '{"id": 1}\n[]\n', '{"di": 1}\n'])
def test_a_file_that_holds_something_else_is_not_written_to(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=r"notes\.txt has no result in line [12]: give"):
        finished(path)
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("input", "output", "message"),
    [
        ("none.jsonl", "out.jsonl", "none.jsonl cannot be read: No such file"),
        ("in.jsonl", "none/out.jsonl", "none/out.jsonl cannot be written"),
    ],
)
def test_files_are_checked_before_anything_is_loaded(
    input: str,
    output: str,
    message: str,
    session: FakeSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(tmp_path / "in.jsonl", GOOD)
    assert run((tmp_path / input, tmp_path / output)) == 2
    assert message in capsys.readouterr().err
    assert not session.opened


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--kv-memory", "'much' is not a number of bytes, such as 500M or 2G"),
        ("--step-timeout", "'much' is not a number"),
        ("--max-sequences", "'much' is not a whole number of 1 or more and at most 65,536"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(
    option: str, message: str, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(paths, option, "much") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("which", [0, 1])
def test_a_pipe_is_neither_read_nor_written(
    which: int, session: FakeSession, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(paths[0], GOOD)
    files = list(paths)
    files[which] = Path("/dev/null")
    assert run((files[0], files[1])) == 2
    assert f"put {files[which]} is a pipe or a device: give a file" in capsys.readouterr().err


def test_results_do_not_go_to_the_input(
    session: FakeSession, paths: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(paths[0], GOOD)
    before = paths[0].read_bytes()
    assert run((paths[0], paths[0])) == 2
    assert "is also the --input: give results a file of their own" in capsys.readouterr().err
    assert paths[0].read_bytes() == before
