"""The `batch` command: many prompts from a file, their results to another as they are finished."""

from __future__ import annotations

import fcntl
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import FileIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from buddy_pipeline.launcher.api import Pipeline
from buddy_pipeline.launcher.batch_lines import Id, Line, finished, read_lines
from buddy_pipeline.launcher.generate import Request
from buddy_pipeline.launcher.output import Result, result_fields
from buddy_pipeline.launcher.paths import check_writable
from buddy_pipeline.launcher.settings import BatchSettings
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.error_lines import print_error

if TYPE_CHECKING:
    from buddy_pipeline.launcher.tokenizer import Tokenizer


def batch_command(settings: BatchSettings) -> int:
    """Runs on every rank and returns its exit code: 1 if a line of the input was bad, else 0."""

    def check(tokenizer: Tokenizer, context: int) -> None:
        with _open_input(settings.input):
            check_writable("--output", settings.output)
            _check_files(settings.input, settings.output)
            if settings.output.exists():
                with _open_output(settings.output):
                    finished(settings.output)

    with (
        Pipeline(settings, check) as pipeline,
        _open_input(settings.input) as texts,
        _open_output(settings.output) as output,
    ):
        started = time.perf_counter()
        done = finished(settings.output)
        total = sum(1 for text in texts if text.strip())
        texts.seek(0)
        lines = read_lines(texts, pipeline.tokenizer, pipeline.engine.context_length, done)
        with typer.progressbar(length=total, label="batch", file=sys.stderr) as bar:
            bar.update(len(done))
            batch = _Batch(lines, bar)
            for number, result in pipeline.answers(batch.requests()):
                _write_result(output, batch.ids.pop(number), result)
                batch.count(result)
        seconds = time.perf_counter() - started
    if settings.stats:
        print(batch.summary(seconds, len(done)), file=sys.stderr)
    return 1 if batch.bad else 0


def _write_result(output: FileIO, id: Id, result: Result) -> None:
    """Writes one line in one piece, so that an interruption leaves whole lines behind."""
    line = json.dumps({"id": id, **result_fields(result)}, ensure_ascii=False) + "\n"
    left = line.encode()
    try:
        while left:  # a full disk takes a part; the next piece says why
            left = left[output.write(left) :]
    except OSError as error:
        raise UserError(
            f"--output {output.name} cannot be written: {error.strerror}; make room and run"
            " the same command again, which keeps the results so far"
        ) from None


@dataclass
class _Batch:
    """The lines on their way to the engine, and what has come of them."""

    lines: Iterator[Line | UserError]
    bar: Any
    ids: dict[int, Id] = field(default_factory=dict)
    """By number of the request."""
    bad: int = 0
    results: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0

    def requests(self) -> Iterator[Request]:
        """What the good lines ask for; each bad one is reported and passed over."""
        number = 0
        for line in self.lines:
            if isinstance(line, UserError):
                self.bad += 1
                sys.stderr.write("\n")  # the progress bar has no line of its own
                print_error(str(line))
                self.bar.update(1)
            else:
                self.ids[number] = line.id
                number += 1
                yield line.request

    def count(self, result: Result) -> None:
        self.results += 1
        self.prompt_tokens += result.stats.prompt_tokens
        self.reused_tokens += result.stats.reused_prompt_tokens
        self.generated_tokens += result.stats.generation_tokens
        self.bar.update(1)

    def summary(self, seconds: float, done_before: int) -> str:
        """All of it for people, in one line."""
        tokens = self.prompt_tokens + self.generated_tokens
        before = f", {done_before} done before" if done_before else ""
        bad = f", {counted(self.bad, 'bad line')} skipped" if self.bad else ""
        return (
            f"{counted(self.results, 'result')}{before}{bad}"
            f" | prompts {counted(self.prompt_tokens, 'token')},"
            f" {self.reused_tokens} of them reused"
            f" | generation {counted(self.generated_tokens, 'token')}"
            f" | {tokens / seconds:.1f} tokens/s in {seconds:.1f} s"
        )


def _open_input(path: Path) -> TextIOWrapper:
    try:
        return open(path, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise UserError(f"--input {path} cannot be read: {error.strerror}") from None


def _check_files(input: Path, output: Path) -> None:
    """Raises UserError for what cannot be read again, as a batch that goes on does."""
    for option, path in (("--input", input), ("--output", output)):
        if path.exists() and not path.is_file():
            raise UserError(f"{option} {path} is a pipe or a device: give a file")
    if output.exists() and output.samefile(input):
        raise UserError(f"--output {output} is also the --input: give results a file of their own")


def _open_output(path: Path) -> FileIO:
    """The file to append to, which is this batch's alone until it is closed."""
    try:
        output = FileIO(path, "a")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        output.close()
        raise UserError(
            f"--output {path} is that of a batch that is running: give results a file of their own"
        ) from None
    except OSError:  # a file system without locks
        pass
    return output
