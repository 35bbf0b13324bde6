"""Which layers each rank owns, and its place in the pipeline.

Forward block b, counted from the embedding, belongs to rank `world - 1 - b`: rank `world - 1`
starts the forward pass and rank 0 ends it, so the logits appear where the user talks to the
program.
"""

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate

from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError


class BlockRole(Enum):
    """What a rank owns besides its layers."""

    SINGLE = "single"  # embedding and head: the only rank
    FIRST = "first"  # the embedding: rank world - 1
    MIDDLE = "middle"  # nothing
    LAST = "last"  # the final norm and the head: rank 0


def block_role(rank: int, world: int) -> BlockRole:
    """The role of `rank` in a pipeline of `world` ranks; UserError if there is no such rank."""
    _check_rank(rank, world)
    if world == 1:
        return BlockRole.SINGLE
    if rank == world - 1:
        return BlockRole.FIRST
    return BlockRole.LAST if rank == 0 else BlockRole.MIDDLE


def pipeline_layer_range(num_layers: int, rank: int, world: int) -> range:
    """The layers of `rank` when `num_layers` are dealt out as evenly as possible.

    The first `num_layers % world` forward blocks get one layer more. With more ranks than layers
    the ranks nearest the head get an empty range. Raises UserError if there is no such rank.
    """
    _check_rank(rank, world)
    return layer_ranges(num_layers, world)[rank]


def layer_ranges(num_layers: int, world: int, split: Sequence[int] | None = None) -> list[range]:
    """The layers of every rank, indexed by rank.

    `split` gives the number of layers of each rank, rank 0 first; without it they are dealt out
    evenly. Raises UserError if `split` does not name `world` sizes that sum to `num_layers`.
    """
    if num_layers < 0:
        raise UserError(
            f"a model of {num_layers} layers cannot be split: give a count of 0 or more"
        )
    if world < 1:
        raise UserError(f"a pipeline of {world} ranks cannot run: use 1 rank or more")
    sizes = _even_sizes(num_layers, world) if split is None else list(split)
    _check_sizes(sizes, num_layers, world)
    # Rank 0 owns the last layers, so its block ends at num_layers and the others follow downwards.
    stops = [num_layers - before for before in accumulate(sizes, initial=0)]
    return [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=False)]


def parse_split(text: str) -> tuple[int, ...]:
    """The value of `--split`, such as "8,8,7,7": layers of each rank, rank 0 first.

    Raises UserError if an entry is not a whole number of 0 or more.
    """
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not (entry.isascii() and entry.isdigit()):
            raise UserError(
                f"--split {text!r}: {entry!r} is not a number of layers;"
                " give one number a rank, rank 0 first, such as 8,8,7,7"
            )
    return tuple(int(entry) for entry in entries)


def _even_sizes(num_layers: int, world: int) -> list[int]:
    base, extra = divmod(num_layers, world)
    forward = [base + (block < extra) for block in range(world)]
    return forward[::-1]


def _check_sizes(sizes: Sequence[int], num_layers: int, world: int) -> None:
    shown = ",".join(map(str, sizes))
    if len(sizes) != world:
        raise UserError(
            f"split {shown} names {counted(len(sizes), 'rank')}, but the pipeline has {world}:"
            " give one number of layers for each rank"
        )
    if any(size < 0 for size in sizes):
        raise UserError(f"split {shown} has a negative number of layers: use 0 or more a rank")
    if sum(sizes) != num_layers:
        raise UserError(
            f"split {shown} sums to {counted(sum(sizes), 'layer')}, but the model has {num_layers}:"
            " make the numbers sum to the model's layers"
        )


def _check_rank(rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise UserError(
            f"rank {rank} does not exist in a pipeline of {counted(world, 'rank')}:"
            f" use a rank from 0 to {world - 1}"
            if world > 0
            else f"a pipeline of {world} ranks cannot run: use 1 rank or more"
        )
