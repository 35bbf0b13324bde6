"""The one generation loop; every front end consumes its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from buddy_pipeline.launcher.stop_texts import StopTexts
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.sampling import Sampler, SamplingOptions, make_sampler

if TYPE_CHECKING:
    from buddy_pipeline.launcher.tokenizer import Tokenizer
    from buddy_pipeline.ranks.engine import Engine

FinishReason = Literal["eos", "stop", "length"]
"""An end-of-sequence token; a stop text; as many tokens as asked for, or a full context."""

_SLOT = 0
"""The sequence's place in the KV cache: a command line runs one sequence."""


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


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    options: SamplingOptions,
    *,
    top_logits: int = 0,
    sampler: Callable[[SamplingOptions], Sampler] = make_sampler,
) -> Iterator[Token]:
    """Yields each token as soon as it is sampled; at least one, and the last has a finish reason.

    The token that ends the sequence is yielded too; its text is not, except with
    `options.ignore_eos`, when control tokens are ordinary ones and the text spells them out. Raises
    UserError for a prompt that is empty, longer than the context or not of the model's tokens.
    """
    check_prompt_length(len(prompt_ids), engine.context_length)
    _check_vocabulary(prompt_ids, engine.vocab_size)
    sample = sampler(options)
    text_of = tokenizer.detokenizer(keep_special=options.ignore_eos)
    stops = StopTexts(options.stop)
    history = list(prompt_ids)
    # The last token needs no place in the context: nothing is computed from it.
    budget = min(options.max_tokens, engine.context_length - len(prompt_ids) + 1)

    logits = engine.prefill(_SLOT, np.asarray(history, dtype=np.int64))
    best = _best_logits(logits, top_logits)
    for remaining in range(budget - 1, -1, -1):
        id = sample(logits, history)
        finish: FinishReason | None = None
        if id in tokenizer.eos_ids and not options.ignore_eos:
            text, finish = "", "eos"
        else:
            text, stopped = stops.push(text_of.push(id))
            if stopped:
                finish = "stop"
            elif remaining == 0:
                finish = "length"
        if finish in ("eos", "length"):
            rest, stopped = stops.push(text_of.finish())
            text += rest
            if stopped:
                finish = "stop"
            else:
                text += stops.finish()
        yield Token(id, text, finish, best)
        if finish is not None:
            return
        best = ()
        history.append(id)
        logits = engine.decode(_SLOT, id, len(history) - 1)


def check_prompt_length(length: int, context: int) -> None:
    """Raises UserError for a prompt of no tokens or of more than the context holds."""
    if length == 0:
        raise UserError("the prompt is empty: give at least one token of text")
    if length > context:
        raise UserError(
            f"the prompt has {length} tokens, but the context holds {context}:"
            " shorten it or raise max_token_len in the spec"
        )


def _check_vocabulary(prompt_ids: Sequence[int], vocab_size: int) -> None:
    """Raises UserError for tokens of a tokenizer that is not the model's."""
    largest = max(prompt_ids)
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer made token {largest}, but the model knows only {vocab_size}:"
            " use the tokenizer that belongs to the model"
        )


def _best_logits(logits: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` largest of logits [vocab], largest first, the lowest id first among equals."""
    order = np.argsort(-logits, kind="stable")[:count] if count else ()
    return tuple((int(id), float(logits[id])) for id in order)
