"""A sequence: one text in the making, and how far the pipeline is with it. Data without policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from buddy_pipeline.ranks.sampling import Sampler


@dataclass(eq=False)
class Sequence:
    """What the engine, the scheduler and the slots know of one sequence."""

    ids: list[int]
    """The prompt, then the tokens generated so far."""
    choose: Sampler
    """Takes the next token from logits."""
    prompt_length: int = field(init=False)
    slot: int | None = None
    """Its place in the KV cache; None while it waits and when it is finished."""
    sent: int = 0
    """Tokens that are in the KV cache, or will be once the steps under way have run."""
    settled: int = 0
    """Those of them that do not belong to the microbatch that is being made up: the next one may
    count on them."""
    under_way: int = 0
    """Microbatches that it is in: chunks of its prompt follow each other, a token waits for the
    one before."""
    reused: int = 0
    """Tokens of the prompt that another sequence had computed already."""
    finished: bool = False

    def __post_init__(self) -> None:
        self.prompt_length = len(self.ids)

    @property
    def pending(self) -> int:
        """Tokens that have not been sent yet."""
        return len(self.ids) - self.sent
