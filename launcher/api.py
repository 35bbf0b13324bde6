"""The Python API: a model over the ranks of this job, and what the command line itself uses.

    with Pipeline.from_spec("smollm2-135m", max_sequences=8) as pipeline:
        for result in pipeline.generate(["Why is the sky blue?", "And the sea?"], max_tokens=40):
            print(result.text)

The same program runs alone and under `mpirun`, where every rank executes it up to the `with`: there
rank 0 goes on, while the others compute for it and leave the program when rank 0 leaves the block.
A rank of it that is killed is named by the MPI launcher only: it has no supervisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from buddy_pipeline.launcher.answer import answer_all
from buddy_pipeline.launcher.generate import Request, Token, check_prompt_length, generate
from buddy_pipeline.launcher.nearest import nearest
from buddy_pipeline.launcher.output import Result
from buddy_pipeline.launcher.prompt import encode_messages, encode_text
from buddy_pipeline.launcher.session import Check, open_session
from buddy_pipeline.launcher.settings import MAX_SEQUENCES, Balance, PipelineSettings
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.kinds import check_kind
from buddy_pipeline.ranks.sampling import SamplingOptions

if TYPE_CHECKING:
    from buddy_pipeline.launcher.chat import Message
    from buddy_pipeline.launcher.tokenizer import Tokenizer
    from buddy_pipeline.ranks.engine import Engine

Prompt = str | Sequence["Message"] | Sequence[int]
"""A text, the messages of a conversation, or token ids."""
_Part = TypeVar("_Part")


class Pipeline:
    """A context manager; inside it, on rank 0, prompts become tokens."""

    def __init__(
        self, settings: PipelineSettings, check: Check | None = None, *, library: bool = False
    ) -> None:
        """`check` and `library` are those of `open_session`."""
        self._open = lambda: open_session(settings, check, library=library)
        self._exit = ExitStack()
        self._engine: Engine | None = None
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def from_spec(
        cls,
        spec: str | Path,
        *,
        variant: str | None = None,
        exact: bool = False,
        kv_cache_dtype: str | None = None,
        local_model: str | Path | None = None,
        threads: int | None = None,
        split: Sequence[int] | None = None,
        balance: Balance | str = Balance.EVEN,
        cache_dir: str | Path | None = None,
        max_sequences: int = MAX_SEQUENCES,
        microbatches: int | None = None,
        prefill_chunk: int | None = None,
        kv_memory_bytes: int | None = None,
        step_timeout_s: float | None = None,
        profile_out: str | Path | None = None,
    ) -> Pipeline:
        """The pipeline of a shipped spec or a JSON file; see `PipelineSettings` for the rest.

        Raises UserError for a value that cannot be, and entering it for what does not fit
        together. Under `mpirun` that, and any exception that leaves the block, ends the program on
        all ranks.
        """
        check_kind("variant", variant, str | None)
        check_kind("kv_cache_dtype", kv_cache_dtype, str | None)
        check_kind("exact", exact, bool)
        settings = PipelineSettings(
            spec=str(spec),
            variant=variant,
            exact=exact,
            kv_cache_dtype=kv_cache_dtype,
            local_model=None if local_model is None else Path(local_model),
            threads=threads,
            split=_split(split),
            balance=_balance(balance),
            cache_dir=None if cache_dir is None else Path(cache_dir),
            max_sequences=max_sequences,
            microbatches=microbatches,
            prefill_chunk=prefill_chunk,
            kv_memory_bytes=kv_memory_bytes,
            step_timeout_s=step_timeout_s,
            profile_out=None if profile_out is None else Path(profile_out),
        )
        return cls(settings, library=True)

    def __enter__(self) -> Pipeline:
        with ExitStack() as stack:
            session = stack.enter_context(self._open())
            if session.engine is not None and session.tokenizer is not None:
                self._engine, self._tokenizer = session.engine, session.tokenizer
                self._exit = stack.pop_all()
                return self
            session.serve()
        raise SystemExit(0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._engine = self._tokenizer = None
        return self._exit.__exit__(kind, error, traceback)

    @property
    def engine(self) -> Engine:
        """Runs sequences; UserError outside the `with` block."""
        return _inside(self._engine)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; UserError outside the `with` block."""
        return _inside(self._tokenizer)

    def generate(
        self,
        prompts: Iterable[Prompt],
        *,
        raw: bool = False,
        top_logits: int = 0,
        **sampling: Any,
    ) -> list[Result]:
        """The answers to all prompts, in their order; `sampling` are fields of `SamplingOptions`.

        raw: texts are prompts as they are, without the model's chat template.
        Raises UserError for a prompt or an option that cannot be.
        """
        if isinstance(prompts, str):  # each of its letters would be a prompt
            raise UserError(f"prompts is the text {prompts!r}: give a list of prompts")
        options = _sampling(sampling)
        requests = [self.request(prompt, options, raw, top_logits) for prompt in prompts]
        results = dict(self.answers(requests))
        return [results[number] for number in range(len(requests))]

    def stream(
        self, prompt: Prompt, *, raw: bool = False, top_logits: int = 0, **sampling: Any
    ) -> Iterator[Token]:
        """The tokens of one answer, each as soon as it is sampled; arguments as for `generate`."""
        request = self.request(prompt, _sampling(sampling), raw, top_logits)
        return generate(self.engine, self.tokenizer, request)

    def answers(
        self,
        requests: Iterable[Request],
        on_token: Callable[[int, Token], None] = lambda number, token: None,
    ) -> Iterator[tuple[int, Result]]:
        """(number of the request, its result) as each is finished; see `answer_all`."""
        return answer_all(self.engine, self.tokenizer, requests, on_token)

    def request(
        self, prompt: Prompt, sampling: SamplingOptions, raw: bool = False, top_logits: int = 0
    ) -> Request:
        """A prompt as what the engine takes; UserError for one that is empty, too long or none."""
        check_kind("top_logits", top_logits, int)
        if top_logits < 0:
            raise UserError(f"top_logits is {top_logits}: it must be 0 or more")
        if isinstance(prompt, str):
            ids = encode_text(prompt, self.tokenizer, raw=raw)
        elif not isinstance(prompt, Iterable):
            raise UserError(f"prompt is {prompt!r}: give a text, messages or token ids")
        else:
            parts: list[Any] = list(prompt)
            if all(isinstance(part, Integral) for part in parts):
                ids = [int(part) for part in parts]
            else:
                from buddy_pipeline.launcher.chat import check_messages

                check_messages(parts, "prompt")
                ids = encode_messages(parts, self.tokenizer)
        check_prompt_length(len(ids), self.engine.context_length)
        return Request(ids, sampling, top_logits)


def _sampling(options: dict[str, Any]) -> SamplingOptions:
    known = {field.name for field in fields(SamplingOptions)}
    for name in options:
        if name not in known:
            raise UserError(f"option {name!r} is unknown: {nearest(name, known)}")
    return SamplingOptions(**options)


def _inside(part: _Part | None) -> _Part:
    if part is None:
        raise UserError("the pipeline is not open: use it inside its with block")
    return part


def _split(value: Sequence[int] | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, Iterable):
        raise UserError(f"split is {value!r}: give the number of layers of each rank")
    counts = tuple(value)
    for count in counts:
        check_kind("split", count, int)
    return counts


def _balance(value: Balance | str) -> Balance:
    try:
        return Balance(value)
    except ValueError:
        known = ", ".join(each.value for each in Balance)
        raise UserError(f"balance is {value!r}: give one of {known}") from None
