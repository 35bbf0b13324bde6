"""Tokens to answers: the texts put together and measured, for one prompt or many at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from buddy_pipeline.launcher.generate import Request, Token, generate_all
from buddy_pipeline.launcher.output import Result, Statistics

if TYPE_CHECKING:
    from buddy_pipeline.launcher.tokenizer import Tokenizer
    from buddy_pipeline.ranks.engine import Engine

_MEMORY_AGE_S = 10.0
"""How old the ranks' figures of peak memory may be when a result takes them: to ask, rank 0 waits
for all steps under way."""


def answer_all(
    engine: Engine,
    tokenizer: Tokenizer,
    requests: Iterable[Request],
    on_token: Callable[[int, Token], None] = lambda number, token: None,
) -> Iterator[tuple[int, Result]]:
    """Runs requests and yields (number of the request, its result) as each is finished.

    `on_token` sees every token as it comes. Times count from when the engine gets the request.
    """
    answers: dict[int, _Answer] = {}

    def noted() -> Iterator[Request]:
        for number, request in enumerate(requests):
            answers[number] = _Answer(request)
            yield request

    peaks: list[int] = []
    asked = -_MEMORY_AGE_S
    for number, token in generate_all(engine, tokenizer, noted()):
        answer = answers[number]
        answer.add(token)
        on_token(number, token)
        if token.finish_reason is not None:
            if time.monotonic() - asked >= _MEMORY_AGE_S:
                peaks, asked = engine.peak_memory(), time.monotonic()
            yield number, answers.pop(number).result(token, peaks)


class _Answer:
    """A result in the making."""

    def __init__(self, request: Request) -> None:
        self._prompt_ids = request.prompt_ids
        self._tokens: list[Token] = []
        self._start = self._first = self._last = time.perf_counter()

    def add(self, token: Token) -> None:
        self._last = time.perf_counter()
        if not self._tokens:
            self._first = self._last
        self._tokens.append(token)

    def result(self, last: Token, peaks: list[int]) -> Result:
        assert last.finish_reason is not None
        tokens, to_first = self._tokens, self._first - self._start
        after_first = len(tokens) - 1
        seconds = self._last - self._first
        return Result(
            prompt_ids=self._prompt_ids,
            token_ids=[token.id for token in tokens],
            text="".join(token.text for token in tokens),
            finish_reason=last.finish_reason,
            stats=Statistics(
                prompt_tokens=len(self._prompt_ids),
                prompt_tokens_per_s=len(self._prompt_ids) / to_first,
                reused_prompt_tokens=tokens[0].reused,
                generation_tokens=len(tokens),
                generation_tokens_per_s=after_first / seconds if after_first else None,
                time_to_first_token_s=to_first,
                peak_memory_bytes=peaks,
            ),
            top_logits=tokens[0].top_logits,
        )
