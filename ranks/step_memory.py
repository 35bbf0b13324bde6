"""What a rank allocates for steps, before it does: in bytes, from the plan and the limits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from buddy_pipeline.compile.manifest import PartitionPlan, Plan
from buddy_pipeline.partition.layers import BlockRole
from buddy_pipeline.ranks.message_layout import buffer_bytes
from buddy_pipeline.ranks.transport import buffers_of


@dataclass(frozen=True)
class Limits:
    """What a rank must have room for at once."""

    tokens: int
    """In a step."""
    rows: int
    """Logits in a step."""
    changes: int
    """To the KV cache, in a step."""
    in_flight: int
    """Steps under way."""


@dataclass(frozen=True)
class StepMemory:
    """What the steps of one rank take."""

    rank: int
    world: int
    token_bytes: int
    """Of one token in the stage: values between partitions, and the kernels' workspace."""
    row_bytes: int
    """Of one token's logits."""
    input_bytes: int
    output_bytes: int
    """Payload of one token of the messages that arrive and that leave."""

    def bytes(self, limits: Limits) -> int:
        """All buffers together."""
        stage = limits.tokens * self.token_bytes + limits.rows * self.row_bytes
        incoming, outgoing = buffers_of(self.rank, self.world, limits.in_flight)

        def message(bytes_per_token: int) -> int:
            sizes = (limits.tokens, limits.rows, bytes_per_token)
            return buffer_bytes(*sizes, max_changes=limits.changes)

        return stage + incoming * message(self.input_bytes) + outgoing * message(self.output_bytes)


def internal_places(
    plan: Plan, partitions: Sequence[PartitionPlan], known: Collection[str]
) -> tuple[dict[str, int], list[int]]:
    """Buffers for values between a rank's own partitions, reused when read for the last time.

    known: values that have a place already.

    Returns the number of each other value's buffer, and the bytes of one token in each buffer.
    """
    last: dict[str, int] = {}
    for number, partition in enumerate(partitions):
        for name in (*partition.inputs, *partition.outputs):
            last[name] = number
    buffers: dict[str, int] = {}
    sizes: list[int] = []
    free: dict[int, list[int]] = {}
    for number, partition in enumerate(partitions):
        for name in partition.outputs:
            if name in known or name in buffers:
                continue
            size = plan.values[name].row_bytes
            if free.get(size):
                buffers[name] = free[size].pop()
            else:
                buffers[name] = len(sizes)
                sizes.append(size)
        for name in dict.fromkeys((*partition.inputs, *partition.outputs)):
            if name in buffers and last[name] == number:
                free.setdefault(plan.values[name].row_bytes, []).append(buffers[name])
    return buffers, sizes


def workspace_bytes(plan: Plan, partitions: Sequence[PartitionPlan]) -> int:
    """Of one token: scratch that all partitions use in turn."""
    return max([sum(plan.templates[p.template].scratch) for p in partitions], default=0)


def logits_bytes(plan: Plan, role: BlockRole) -> int:
    """Of one token's logits on a rank with this role."""
    has_head = role in (BlockRole.LAST, BlockRole.SINGLE)
    return 4 * plan.values[plan.result].stride if has_head else 0
