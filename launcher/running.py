"""The `run` command: rank 0 answers a prompt, the other ranks compute for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from buddy_pipeline.launcher.api import Pipeline
from buddy_pipeline.launcher.generate import Request, check_prompt_length
from buddy_pipeline.launcher.output import TextStream, write_json
from buddy_pipeline.launcher.paths import check_writable
from buddy_pipeline.launcher.prompt import encode_prompt
from buddy_pipeline.launcher.settings import RunSettings

if TYPE_CHECKING:
    from buddy_pipeline.launcher.tokenizer import Tokenizer


def run_command(settings: RunSettings) -> int:
    """Runs on every rank and returns its exit code; streams the text to standard output."""

    def check(tokenizer: Tokenizer, context: int) -> None:
        check_request(settings, tokenizer, context)

    with Pipeline(settings, check) as pipeline:
        stream = TextStream(sys.stdout)
        prompt_ids = encode_prompt(settings.prompt, pipeline.tokenizer)
        request = Request(prompt_ids, settings.sampling, settings.top_logits)
        answers = pipeline.answers([request], lambda number, token: stream.write(token.text))
        ((_, result),) = answers
        stream.finish()
    if settings.stats:
        print(result.stats.line(), file=sys.stderr)
    if settings.json_path is not None:
        write_json(settings.json_path, result)
    return 0


def check_request(settings: RunSettings, tokenizer: Tokenizer, context_length: int) -> None:
    """Raises UserError for what would make the run fail, before anything is compiled or loaded.

    For rank 0: the prompt's file and the folder of the JSON need not exist on other hosts.
    """
    check_prompt_length(len(encode_prompt(settings.prompt, tokenizer)), context_length)
    if settings.json_path is not None:
        check_writable("--json", settings.json_path)
