"""Stand-ins for the pipeline and the tokenizer, with outcomes that a test can write down."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from buddy_pipeline.launcher.token_bytes import Detokenizer
from buddy_pipeline.ranks.sampling import Sampler, SamplingOptions, make_sampler


class FakeTokenizer:
    """Every byte is a token; id 256 ends the sequence and is spelled <eos>."""

    eos_ids = frozenset({256})
    chat_template: str | None = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    special_tokens: ClassVar[dict[str, str]] = {}

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())

    def detokenizer(self, *, keep_special: bool = False) -> Detokenizer:
        eos = b"<eos>" if keep_special else b""
        return Detokenizer(lambda id: eos if id == 256 else bytes([id]), strip_space=False)


@dataclass
class FakeEngine:
    """Continues any prompt with `script`, one token after the other, then with token 0."""

    script: Sequence[int]
    context_length: int = 1000
    vocab_size: int = 257
    chunk: int = 16
    seen: list[int] = field(default_factory=list)
    """Every token it was given, in order of position."""
    closed: bool = False

    def prefill(self, slot: int, ids: np.ndarray, start: int = 0) -> np.ndarray:
        assert ids.dtype == np.int64
        assert start == len(self.seen)
        self.seen += ids.tolist()
        assert len(self.seen) <= self.context_length
        self._prompt_length = len(self.seen)
        return self._logits()

    def decode(self, slot: int, token: int, position: int) -> np.ndarray:
        assert position == len(self.seen)
        self.seen.append(token)
        assert len(self.seen) <= self.context_length
        return self._logits()

    def peak_memory(self) -> list[int]:
        return [300_000_000, 100_000_000]

    def close(self) -> None:
        self.closed = True

    def _logits(self) -> np.ndarray:
        step = len(self.seen) - self._prompt_length
        logits = np.linspace(0, 1, self.vocab_size, dtype=np.float32)
        logits[self.script[step] if step < len(self.script) else 0] = 9.0
        return logits


@dataclass
class FakeSession:
    """What `open_session` yields on one rank."""

    engine: FakeEngine | None
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    served: bool = False

    def sampler(self, options: SamplingOptions) -> Sampler:
        return make_sampler(options)

    def serve(self) -> None:
        self.served = True

    @contextmanager
    def open(self, settings: Any) -> Iterator["FakeSession"]:
        self.settings = settings
        yield self


def scripted(text: str | Iterable[int]) -> FakeEngine:
    """An engine that answers with this text, or these tokens, and then ends the sequence."""
    tokens = list(text.encode()) if isinstance(text, str) else list(text)
    return FakeEngine([*tokens, 256])
