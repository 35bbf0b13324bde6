"""One prompt to one answer on rank 0: its text streamed, its figures measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from buddy_pipeline.launcher.generate import check_prompt_length, generate
from buddy_pipeline.launcher.output import Result, Statistics, TextStream
from buddy_pipeline.launcher.paths import check_writable
from buddy_pipeline.launcher.prompt import encode_prompt
from buddy_pipeline.launcher.settings import RunSettings
from buddy_pipeline.ranks.sampling import Sampler, SamplingOptions, make_sampler

if TYPE_CHECKING:
    from buddy_pipeline.launcher.tokenizer import Tokenizer
    from buddy_pipeline.ranks.engine import Engine


def check_request(settings: RunSettings, tokenizer: Tokenizer, context_length: int) -> None:
    """Raises UserError for what would make `answer` fail, before anything is compiled or loaded.

    For rank 0: the prompt's file and the folder of the JSON need not exist on other hosts.
    """
    check_prompt_length(len(encode_prompt(settings.prompt, tokenizer)), context_length)
    if settings.json_path is not None:
        check_writable("--json", settings.json_path)


def answer(
    engine: Engine,
    tokenizer: Tokenizer,
    settings: RunSettings,
    sampler: Callable[[SamplingOptions], Sampler] = make_sampler,
) -> Result:
    """Generates what the settings ask for, streaming the text to standard output.

    Raises UserError for a prompt that cannot be read, is empty or too long.
    """
    prompt_ids = encode_prompt(settings.prompt, tokenizer)
    stream = TextStream(sys.stdout)
    token_ids: list[int] = []
    pieces: list[str] = []

    start = first = last = time.perf_counter()
    for token in generate(
        engine,
        tokenizer,
        prompt_ids,
        settings.sampling,
        top_logits=settings.top_logits,
        sampler=sampler,
    ):
        last = time.perf_counter()
        if not token_ids:
            first = last
            top_logits = token.top_logits
        stream.write(token.text)
        token_ids.append(token.id)
        pieces.append(token.text)
        finish_reason = token.finish_reason
    stream.finish()

    assert finish_reason is not None  # generate() promises it on the last token
    after_first = len(token_ids) - 1
    return Result(
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        text="".join(pieces),
        finish_reason=finish_reason,
        stats=Statistics(
            prompt_tokens=len(prompt_ids),
            prompt_tokens_per_s=len(prompt_ids) / (first - start),
            generation_tokens=len(token_ids),
            generation_tokens_per_s=after_first / (last - first) if after_first else None,
            time_to_first_token_s=first - start,
            peak_memory_bytes=engine.peak_memory(),
        ),
        top_logits=top_logits,
    )
