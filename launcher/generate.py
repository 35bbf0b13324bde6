"""The one generation loop; every front end consumes its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from buddy_pipeline.launcher.stop_texts import StopTexts
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.sampling import SamplingOptions, make_sampler
from buddy_pipeline.ranks.sequence import Sequence

if TYPE_CHECKING:
    from buddy_pipeline.launcher.tokenizer import Tokenizer
    from buddy_pipeline.ranks.engine import Engine

FinishReason = Literal["eos", "stop", "length"]
"""An end-of-sequence token; a stop text; as many tokens as asked for, or a full context."""


@dataclass(frozen=True)
class Request:
    """What is asked for one prompt."""

    prompt_ids: list[int]
    sampling: SamplingOptions
    top_logits: int = 0
    """How many of the best logits after the prompt are wanted."""


@dataclass(frozen=True)
class Token:
    """One generated token, with the text that has become certain with it."""

    id: int
    text: str
    """Perhaps empty: a part of a character, a control token, or what may begin a stop text."""
    finish_reason: FinishReason | None
    """Set on the last token."""
    top_logits: tuple[tuple[int, float], ...] = ()
    """On the first token, when asked for: (id, logit) of the best tokens after the prompt."""
    reused: int = 0
    """On the first token: tokens of the prompt that another sequence had computed already."""


def generate(engine: Engine, tokenizer: Tokenizer, request: Request) -> Iterator[Token]:
    """`generate_all` for one request."""
    for _, token in generate_all(engine, tokenizer, [request]):
        yield token


def generate_all(
    engine: Engine, tokenizer: Tokenizer, requests: Iterable[Request]
) -> Iterator[tuple[int, Token]]:
    """Runs requests through the engine and yields (number of the request, its next token).

    Each request has at least one token, and its last one has a finish reason. Tokens of different
    requests come in any order, each as soon as it is sampled. The token that ends a sequence is
    yielded too; its text is not, except with `ignore_eos`, when control tokens are ordinary ones
    and the text spells them out. Requests are taken from the iterable only as the engine has use
    for them. Raises UserError for a prompt that is empty, longer than the context or not of the
    model's tokens. Closing the iterator ends its sequences. Several iterators of one engine may be
    used by turns: each brings the others on, whose tokens wait until they are asked for.
    """
    queue = enumerate(requests)
    mine: set[_Generation] = set()
    tokens: list[tuple[int, Token]] = []
    try:
        while True:
            for number, request in queue:
                check_prompt(request.prompt_ids, engine)
                generation = _Generation(number, request, tokenizer, engine.context_length, tokens)
                _RUNNING[generation.sequence] = generation
                mine.add(generation)
                engine.submit(generation.sequence)
                if engine.waiting >= engine.max_sequences:
                    break
            # All tokens are made before the first is yielded: the logits last no longer.
            while not tokens:
                # With nothing left to wait for, the last call takes in what is under way.
                sampled = list(engine.advance()) if mine or not _RUNNING else []
                if not sampled:
                    return
                for each in sampled:
                    generation = _RUNNING[each.sequence]
                    token = generation.token(each.token, each.logits)
                    if token.finish_reason is not None:
                        engine.finish(each.sequence)
                        del _RUNNING[each.sequence]
                    generation.tokens.append((generation.number, token))
            ready = tokens.copy()
            tokens.clear()
            mine = {each for each in mine if each.sequence in _RUNNING}
            yield from ready
    finally:
        for generation in mine:
            if _RUNNING.pop(generation.sequence, None) is not None:
                engine.finish(generation.sequence)


class _Generation:
    """One request on its way: from sampled ids to tokens with text and a reason to end."""

    def __init__(
        self,
        number: int,
        request: Request,
        tokenizer: Tokenizer,
        context: int,
        tokens: list[tuple[int, Token]],
    ) -> None:
        """`tokens` is where its tokens go, each with its number."""
        options = request.sampling
        self.number = number
        self.tokens = tokens
        self.sequence = Sequence(list(request.prompt_ids), make_sampler(options))
        # The last token needs no place in the context: nothing is computed from it.
        self._remaining = min(options.max_tokens, context - len(request.prompt_ids) + 1)
        self._eos_ids = frozenset[int]() if options.ignore_eos else tokenizer.eos_ids
        self._text = tokenizer.detokenizer(keep_special=options.ignore_eos)
        self._stops = StopTexts(options.stop)
        self._top_logits = request.top_logits

    def token(self, id: int, logits: np.ndarray) -> Token:
        """The sampled `id` as a token; `logits` [vocab] are those that it was chosen from."""
        is_first = len(self.sequence.ids) == self.sequence.prompt_length + 1
        best = _best_logits(logits, self._top_logits) if is_first else ()
        self._remaining -= 1
        text = ""
        finish: FinishReason | None = None
        if id in self._eos_ids:
            finish = "eos"
        else:
            text, stopped = self._stops.push(self._text.push(id))
            if stopped:
                finish = "stop"
            elif self._remaining == 0:
                finish = "length"
        if finish in ("eos", "length"):
            rest, stopped = self._stops.push(self._text.finish())
            text += rest
            if stopped:
                finish = "stop"
            else:
                text += self._stops.finish()
        return Token(id, text, finish, best, self.sequence.reused if is_first else 0)


def check_prompt_length(length: int, context: int) -> None:
    """Raises UserError for a prompt of no tokens or of more than the context holds."""
    if length == 0:
        raise UserError("the prompt is empty: give at least one token of text")
    if length > context:
        raise UserError(
            f"the prompt has {counted(length, 'token')}, but the context holds {context}:"
            " shorten it or raise max_token_len in the spec"
        )


def check_prompt(ids: list[int], engine: Engine) -> None:
    """Raises UserError for what the engine cannot take: also for tokens of a tokenizer that is not
    the model's."""
    check_prompt_length(len(ids), engine.context_length)
    if min(ids) < 0:
        raise UserError(f"the prompt has token {min(ids)}: tokens are numbers of 0 or more")
    largest = max(ids)
    if largest >= engine.vocab_size:
        raise UserError(
            f"the tokenizer made token {largest}, but the model knows only {engine.vocab_size}:"
            " use the tokenizer that belongs to the model"
        )


def _best_logits(logits: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` largest of logits [vocab], largest first, the lowest id first among equals."""
    order = np.argsort(-logits, kind="stable")[:count] if count else ()
    return tuple((int(id), float(logits[id])) for id in order)


_RUNNING: dict[Sequence, _Generation] = {}
"""Of all iterators of this process, by what the engine knows them by."""
