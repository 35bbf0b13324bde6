"""How large steps may get by the options, and whether a rank has the memory for that."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from buddy_pipeline.launcher.loading import StepSizes
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.slots import MOST_CHANGES
from buddy_pipeline.ranks.step_memory import Limits, StepMemory

#: Tokens of one step at most: enough to reuse weights from cache, few enough for small buffers.
CHUNK = 512
#: Slots of the KV cache for each sequence that may run: one for it, one for a finished sequence
#: whose prefix may be wanted again.
_SLOTS_A_SEQUENCE = 2


@dataclass(frozen=True)
class Asked:
    """The options that decide how much memory steps take."""

    max_sequences: int
    prefill_chunk: int | None
    microbatches: int | None

    def sizes(self) -> StepSizes:
        """The most that one step carries."""
        return StepSizes(
            tokens=max(CHUNK, self.max_sequences, self.prefill_chunk or 0),
            rows=self.max_sequences,
            slots=_SLOTS_A_SEQUENCE * self.max_sequences,
        )

    def groups(self, world: int) -> int:
        """Parts that decoding sequences are dealt out to, to begin with. A sequence is in one
        microbatch at a time: more of these than sequences would be empty."""
        return min(self.microbatches or world, max(self.max_sequences, world))

    def in_flight(self, world: int) -> int:
        """Steps under way. One more than the groups: a step that waits in front of rank world-1
        hides rank 0's sampling."""
        return self.groups(world) + (world > 1)

    def changes(self) -> int:
        """To the KV cache in a step, at most."""
        return MOST_CHANGES * self.sizes().slots


def check_memory(asked: Asked, need: StepMemory, available: int) -> None:
    """Raises UserError, with values that fit, if the buffers for steps do not.

    available: bytes that this rank may take.
    """

    def total(options: Asked) -> int:
        sizes = options.sizes()
        in_flight = options.in_flight(need.world)
        return need.bytes(Limits(sizes.tokens, sizes.rows, options.changes(), in_flight))

    if total(asked) <= available:
        return
    given = {name: value for name, value in vars(asked).items() if value is not None}
    changes: list[str] = []
    options, left = asked, set(given)
    while left:  # first the option that takes most; another one only where that does not suffice
        name = min(sorted(left), key=lambda name: total(replace(options, **{name: 1})))
        left.remove(name)

        def fits(value: int, options: Asked = options, name: str = name) -> bool:
            return total(replace(options, **{name: value})) <= available

        most = _most(fits, given[name])
        options = replace(options, **{name: max(1, most)})
        changes.append(f"--{name.replace('_', '-')} {given[name]} to {max(1, most)}")
        if most:
            break
    else:
        raise UserError(
            f"the smallest buffers for steps take {_gigabytes(total(options))}, but this rank may "
            f"take {_gigabytes(available)}: use more hosts"
        )
    raise UserError(
        f"buffers for steps would take {_gigabytes(total(asked))}, but this rank may take "
        f"{_gigabytes(available)}: lower {' and '.join(changes)}"
    )


def _most(fits: Callable[[int], bool], end: int) -> int:
    """The greatest of 1 … end that fits, to two digits; 0 if none does."""
    low, high = 0, end
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    unit = 10 ** max(0, math.floor(math.log10(low)) - 1) if low else 1
    return low // unit * unit


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB"
