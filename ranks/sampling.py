"""From logits to the next token: a chain of small pure functions, composed once per request.

The order is that of llama.cpp's default chain (`common_params_sampling.samplers` in
https://github.com/ggml-org/llama.cpp/blob/master/common/common.h, without the samplers that are
off by default): repeat penalty, top-k, top-p, min-p, temperature, draw. So top-p and min-p see the
probabilities before the temperature flattens or sharpens them.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import numpy as np

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.kinds import check_kind

Sampler = Callable[[np.ndarray, Sequence[int]], int]
"""(logits float32 [vocab], ids of prompt and generation so far) -> id of the next token."""


@dataclass(frozen=True)
class Candidates:
    """Tokens still in the draw: `ids` int64 [n] and their `logits` float64 [n], n >= 1."""

    ids: np.ndarray
    logits: np.ndarray


#: Tokens that top-p looks at first.
_NUCLEUS = 256

Filter = Callable[[Candidates], Candidates]
"""Drops or rescales candidates; keeps at least one."""


_HOTTEST = sys.float_info.max  # a whole number may be larger, and is no float then
#: The repeat penalties that leave every logit finite in f32.
_LEAST_PENALTY, _MOST_PENALTY = 1e-6, 1e6


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen and when generation ends.

    Raises UserError for a value of another kind or out of range; the message starts with the
    field's name. `stop` may be given as one text or a list of texts.
    """

    max_tokens: int = 256
    """Most tokens to generate, at least 1."""
    temperature: float = 0.0
    """Divides the logits; 0 takes the best token, whatever the filters below say."""
    top_k: int = 0
    """Keep only the k best tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest best tokens whose probabilities sum to at least p, 0 < p <= 1."""
    min_p: float = 0.0
    """Drop tokens less probable than p times the best one, 0 <= p <= 1."""
    repeat_penalty: float = 1.0
    """Pushes down the logits of recent tokens; 1 does nothing."""
    repeat_last_n: int = 64
    """How many tokens are recent; 0 none, -1 all."""
    seed: int | None = None
    """Fixes the draws; None takes fresh entropy."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation and are not part of its text."""
    ignore_eos: bool = False
    """Treat end-of-sequence tokens as ordinary ones."""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(SamplingOptions).items():
            if name != "stop":
                check_kind(name, getattr(self, name), kind)
        texts: Any = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"stop is {texts!r}: it must be a text or a list of texts")
        object.__setattr__(self, "stop", tuple(texts))
        for name, legal, rule in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature <= _HOTTEST, "a finite number, 0 or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            (
                "repeat_penalty",
                _LEAST_PENALTY <= self.repeat_penalty <= _MOST_PENALTY,
                "between 0.000001 and 1000000",
            ),
            ("repeat_last_n", self.repeat_last_n >= -1, "-1 (all tokens), 0 (none) or more"),
            ("seed", self.seed is None or self.seed >= 0, "0 or more"),
        ):
            if not legal:
                raise UserError(f"{name} is {getattr(self, name)}: it must be {rule}")
        if "" in self.stop:
            raise UserError("stop is empty: give the text that ends the generation")


def make_sampler(options: SamplingOptions) -> Sampler:
    """The whole chain as one function of logits and history; it never writes to the logits.

    Two samplers made from the same options, `seed` included, choose the same tokens from the same
    logits. Raises FloatingPointError when the best logit is not finite: then an earlier rank has
    computed garbage, and any token would hide it.
    """
    penalise = _repeat_penalty(options.repeat_penalty, options.repeat_last_n)
    if options.temperature == 0:
        return lambda logits, history: greedy(penalise(logits, history))

    filters: list[Filter] = []
    if options.top_k:
        filters.append(top_k(options.top_k))
    if options.top_p < 1:
        filters.append(top_p(options.top_p))
    if options.min_p > 0:
        filters.append(min_p(options.min_p))
    filters.append(temperature(options.temperature))
    random = np.random.default_rng(options.seed)

    def sample(logits: np.ndarray, history: Sequence[int]) -> int:
        penalised = penalise(logits, history)
        greedy(penalised)  # raises on logits that are not finite
        candidates = Candidates(np.arange(len(penalised)), penalised.astype(np.float64))
        for step in filters:
            candidates = step(candidates)
        return draw(candidates, random.random())

    return sample


def greedy(logits: np.ndarray) -> int:
    """The token with the largest logit, the lowest id among equals; logits [vocab]."""
    best = int(np.argmax(logits))  # argmax takes a NaN, if there is one, for the largest
    if not np.isfinite(logits[best]):
        raise FloatingPointError(f"logit {logits[best]} of token {best} is not a finite number")
    return best


def top_k(k: int) -> Filter:
    """Keeps the k best tokens, best first; among equals the lowest ids."""

    def keep(candidates: Candidates) -> Candidates:
        ids, logits = candidates.ids, candidates.logits
        if k < len(ids):
            threshold = np.partition(logits, -k)[-k]
            inside = np.flatnonzero(logits >= threshold)
            ids, logits = ids[inside], logits[inside]
        return _best_first(Candidates(ids, logits), k)

    return keep


def top_p(p: float) -> Filter:
    """Keeps the fewest best tokens whose probabilities sum to at least p, best first.

    Nucleus sampling, https://arxiv.org/abs/1904.09751.
    """

    def keep(candidates: Candidates) -> Candidates:
        largest, few = candidates.logits.max(), _NUCLEUS
        total = np.exp(candidates.logits - largest).sum()
        while True:
            # Sorting all of a vocabulary takes longer than computing its logits did.
            best = top_k(few)(candidates)
            cumulated = np.cumsum(np.exp(best.logits - largest)) / total
            if cumulated[-1] >= p or few >= len(candidates.ids):
                count = int(np.searchsorted(cumulated, p)) + 1
                return Candidates(best.ids[:count], best.logits[:count])
            few *= 16

    return keep


def min_p(p: float) -> Filter:
    """Drops tokens less probable than p times the best one, https://arxiv.org/abs/2407.01082."""
    distance = math.log(p)

    def keep(candidates: Candidates) -> Candidates:
        inside = candidates.logits >= candidates.logits.max() + distance
        return Candidates(candidates.ids[inside], candidates.logits[inside])

    return keep


def temperature(value: float) -> Filter:
    """Divides the logits' distances to the best one by `value`, above 0."""

    def divide(candidates: Candidates) -> Candidates:
        # The best logit becomes 0 however small `value` is; others may go to minus infinity.
        with np.errstate(over="ignore"):
            logits = (candidates.logits - candidates.logits.max()) / value
        return Candidates(candidates.ids, logits)

    return divide


def draw(candidates: Candidates, uniform: float) -> int:
    """The token in whose share of the unit interval `uniform`, in [0, 1), falls."""
    cumulated = np.cumsum(probabilities(candidates.logits))
    # The sum may end a little off 1: scaling by it keeps the last share from growing or vanishing.
    index = int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))
    return int(candidates.ids[min(index, len(candidates.ids) - 1)])


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax of float64 logits [n]."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _best_first(candidates: Candidates, count: int) -> Candidates:
    """The `count` best candidates by falling logit, equal ones in their present order."""
    order = np.argsort(-candidates.logits, kind="stable")[:count]
    return Candidates(candidates.ids[order], candidates.logits[order])


def _repeat_penalty(
    penalty: float, last_n: int
) -> Callable[[np.ndarray, Sequence[int]], np.ndarray]:
    """Divides positive logits of the last n tokens by the penalty and multiplies the others.

    The rule of CTRL (https://arxiv.org/abs/1909.05858) with llama.cpp's mend for negative logits,
    which a division would make more likely. A token counts once, however often it occurs.
    """
    if penalty == 1 or last_n == 0:
        return lambda logits, history: logits

    def penalise(logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
        recent = np.unique(np.asarray(history if last_n < 0 else history[-last_n:], dtype=np.int64))
        penalised = logits.copy()
        chosen = logits[recent]
        penalised[recent] = np.where(chosen > 0, chosen / penalty, chosen * penalty)
        return penalised

    return penalise
