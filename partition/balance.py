"""The contiguous split whose costliest stage costs least."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

StageCost = Callable[[int, range], float]
"""What a rank's stage costs with these layers; never less for a range with more around it."""


def best_split(layers: int, world: int, cost: StageCost) -> tuple[int, ...] | None:
    """The number of layers of every rank, rank 0 first, with the least greatest stage cost.

    No contiguous split in the order of the pipeline (rank `world - 1` has the first layers) has a
    smaller greatest cost; among those that have it too, this one has stages of about one cost.
    Stages may be empty. An infinite cost says that a stage is impossible; None if in every split
    some stage is.
    """
    blocks = _Blocks(layers, world, cost)
    limit = _least_limit(blocks)
    return None if limit is None else tuple(reversed(_even_within(blocks, limit)))


def greatest_cost(sizes: Sequence[int], cost: StageCost) -> float:
    """The cost of the costliest stage of a split (layers of each rank, rank 0 first)."""
    stop = sum(sizes)
    costs = []
    for rank, size in enumerate(sizes):
        costs.append(cost(rank, range(stop - size, stop)))
        stop -= size
    return max(costs)


@dataclass(frozen=True)
class _Blocks:
    """The stages in the order of the pipeline: block b belongs to rank `world - 1 - b`."""

    layers: int
    world: int
    cost: StageCost

    def cost_of(self, block: int, start: int, stop: int) -> float:
        return self.cost(self.world - 1 - block, range(start, stop))

    def farthest(self, block: int, start: int, limit: float) -> int | None:
        """The last layer boundary that a block from `start` reaches within the limit; None if
        even without layers it costs more."""
        if self.cost_of(block, start, start) > limit:
            return None
        low, high = start, self.layers  # the boundary is at `low` or between
        while low < high:
            middle = (low + high + 1) // 2
            if self.cost_of(block, start, middle) <= limit:
                low = middle
            else:
                high = middle - 1
        return low

    def nearest(self, block: int, stop: int, limit: float) -> int:
        """The first layer boundary from which a block to `stop` stays within the limit."""
        low, high = 0, stop
        while low < high:
            middle = (low + high) // 2
            if self.cost_of(block, middle, stop) <= limit:
                high = middle
            else:
                low = middle + 1
        return low

    def costing(self, block: int, start: int, least: float) -> int:
        """The first layer boundary to which a block from `start` costs at least this; the last if
        there is none."""
        low, high = start, self.layers
        while low < high:
            middle = (low + high) // 2
            if self.cost_of(block, start, middle) >= least:
                high = middle
            else:
                low = middle + 1
        return low

    def greedy(self, limit: float) -> float | None:
        """The greatest cost when every block takes as much as the limit lets it; None if layers
        are left over. Taking less never helps the blocks that follow."""
        start, greatest = 0, -math.inf
        for block in range(self.world):
            stop = self.farthest(block, start, limit)
            if stop is None:
                return None
            greatest = max(greatest, self.cost_of(block, start, stop))
            start = stop
        return greatest if start == self.layers else None


def _least_limit(blocks: _Blocks) -> float | None:
    """The least greatest cost of any split, exactly: bisection, in which a limit that can be kept
    is at once lowered to what keeping it cost, until no number lies between. None if none is
    finite."""
    low = max(blocks.cost_of(block, 0, 0) for block in range(blocks.world))
    if low == math.inf:
        return None
    least = blocks.greedy(low)
    if least is not None:
        return least
    high = blocks.greedy(sys.float_info.max)
    if high is None:
        return None
    while math.nextafter(low, math.inf) < high:
        middle = low + (high - low) / 2
        kept = blocks.greedy(middle)
        if kept is None:
            low = middle
        else:
            high = kept
    return high


def _even_within(blocks: _Blocks, limit: float) -> list[int]:
    """Layers of each block: an even share of the costs that are left, as the limit allows."""
    # Where each block must at least end, so that those behind it manage the rest.
    ends = [blocks.layers] * blocks.world
    for block in range(blocks.world - 1, 0, -1):
        ends[block - 1] = blocks.nearest(block, ends[block], limit)
    idle_behind = [0.0] * blocks.world
    for block in range(blocks.world - 1, 0, -1):
        idle_behind[block - 1] = idle_behind[block] + blocks.cost_of(block, 0, 0)
    sizes = []
    start = 0
    for block, end in enumerate(ends):
        farthest = blocks.farthest(block, start, limit)
        assert farthest is not None  # the limit can be kept
        left = blocks.cost_of(block, start, blocks.layers) + idle_behind[block]
        share = blocks.costing(block, start, left / (blocks.world - block))
        stop = max(end, min(farthest, share))
        sizes.append(stop - start)
        start = stop
    return sizes
