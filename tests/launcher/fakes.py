"""Stand-ins for the pipeline and the tokenizer, with outcomes that a test can write down."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from buddy_pipeline.launcher.token_bytes import Detokenizer
from buddy_pipeline.ranks.engine import Sampled
from buddy_pipeline.ranks.sequence import Sequence as PipelineSequence


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
    max_sequences: int = 2
    running: list[PipelineSequence] = field(default_factory=list)
    """First come, first served: `max_sequences` of them have a token in each round."""
    seen: list[list[int]] = field(default_factory=list)
    """What each sequence that has ended was given: its prompt and the tokens fed back."""
    finished: list[PipelineSequence] = field(default_factory=list)
    memory_asked: int = 0
    closed: bool = False

    @property
    def waiting(self) -> int:
        return max(0, len(self.running) - self.max_sequences)

    def submit(self, sequence: PipelineSequence) -> None:
        assert 1 <= len(sequence.ids) <= self.context_length
        self.running.append(sequence)

    def advance(self) -> list[Sampled]:
        sampled = []
        for sequence in self.running[: self.max_sequences]:
            assert len(sequence.ids) <= self.context_length
            step = len(sequence.ids) - sequence.prompt_length
            logits = np.linspace(0, 1, self.vocab_size, dtype=np.float32)
            logits[self.script[step] if step < len(self.script) else 0] = 9.0
            token = sequence.choose(logits, sequence.ids)
            sequence.ids.append(token)
            sampled.append(Sampled(sequence, token, logits))
        return sampled

    def finish(self, sequence: PipelineSequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            self.finished.append(sequence)
            self.seen.append(sequence.ids[:-1])

    def peak_memory(self) -> list[int]:
        self.memory_asked += 1
        return [300_000_000, 100_000_000]

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeSession:
    """What `open_session` yields on one rank."""

    engine: FakeEngine | None
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    opened: bool = False
    served: bool = False

    def serve(self) -> None:
        self.served = True

    @contextmanager
    def open(
        self, settings: Any, check: Any = None, *, library: bool = False
    ) -> Iterator["FakeSession"]:
        self.settings, self.library = settings, library
        if check is not None and self.engine is not None:
            check(self.tokenizer, self.engine.context_length)
        self.opened = True
        yield self


def scripted(text: str | Iterable[int]) -> FakeEngine:
    """An engine that answers with this text, or these tokens, and then ends the sequence."""
    tokens = list(text.encode()) if isinstance(text, str) else list(text)
    return FakeEngine([*tokens, 256])
