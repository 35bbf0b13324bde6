"""What a run leaves behind: text as it comes, a line of statistics, a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from buddy_pipeline.compile.cache import write_atomically
from buddy_pipeline.launcher.generate import FinishReason
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError


@dataclass(frozen=True)
class Statistics:
    """How fast a run was; rates are tokens per second."""

    prompt_tokens: int
    prompt_tokens_per_s: float
    """Over the time to the first token."""
    reused_prompt_tokens: int
    """Tokens of the prompt that another sequence had computed already."""
    generation_tokens: int
    generation_tokens_per_s: float | None
    """Over the time after the first token; None when there is no second."""
    time_to_first_token_s: float
    peak_memory_bytes: list[int]
    """Most resident memory of each rank's process, by rank."""

    def line(self) -> str:
        """All of it for people, in one line."""
        rate = self.generation_tokens_per_s
        memory = ", ".join(f"{size / 1e6:,.0f}" for size in self.peak_memory_bytes)
        return (
            f"prompt {counted(self.prompt_tokens, 'token')},"
            f" {self.prompt_tokens_per_s:.1f} tokens/s"
            f" | generation {counted(self.generation_tokens, 'token')},"
            f" {'-' if rate is None else f'{rate:.1f}'} tokens/s"
            f" | first token after {self.time_to_first_token_s:.3f} s"
            f" | peak memory by rank {memory} MB"
        )


@dataclass(frozen=True)
class Result:
    """A finished generation."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stats: Statistics
    top_logits: Sequence[tuple[int, float]]
    """The best tokens after the prompt with their logits; empty when not asked for."""


class TextStream:
    """Writes pieces of text to a terminal or pipe as they come.

    Raises UserError for an output that is closed or full, BrokenPipeError for one whose reader has
    gone.
    """

    def __init__(self, stream: TextIO | None) -> None:
        if stream is None:
            raise UserError("standard output is closed: leave it open, or send it to /dev/null")
        self._stream = stream
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # A terminal without Unicode shows "?" for what it lacks instead of ending the run.
            reconfigure(errors="replace")

    def write(self, text: str) -> None:
        """Writes and flushes a piece, if there is anything in it."""
        if not text:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(
                f"standard output cannot be written ({error.strerror}): send it elsewhere"
            ) from None

    def finish(self) -> None:
        """Ends the line, so that whatever is printed next begins its own."""
        self.write("\n")


def result_fields(result: Result) -> dict[str, Any]:
    """The result as JSON has it; `top_logits` only if they were asked for."""
    fields = asdict(result)
    if result.top_logits:
        fields["top_logits"] = [[id, logit] for id, logit in result.top_logits]
    else:
        del fields["top_logits"]
    return fields


def write_json(path: Path, result: Result) -> None:
    """Writes the result atomically: readers see the old file or the whole new one."""
    text = json.dumps(result_fields(result), ensure_ascii=False, indent=1) + "\n"
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror}") from None
