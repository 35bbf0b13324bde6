"""Which cores and how many threads a rank gets when several ranks share a host."""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from buddy_pipeline.ranks.world import World

_BINDING_CHOICES = ("KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""With any of these a user has decided where threads run."""


@dataclass(frozen=True)
class CoreShare:
    """The cores that one rank may keep busy."""

    cores: tuple[int, ...]
    """Numbers of the cores, ascending, at least one."""
    exclusive: bool
    """False if there are more ranks than cores, so that other ranks run on these cores too."""


def available_cores() -> frozenset[int]:
    """The cores that this process may run on, which a launcher or cpuset may have narrowed."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # macOS has no affinity


def core_share(affinities: Sequence[frozenset[int]], local_rank: int) -> CoreShare:
    """The share of the rank `local_rank` of a host.

    affinities: the cores that each rank of this host may run on, by local rank.

    Ranks that may run on the same cores get contiguous parts of them, equal up to one core, since
    neighbouring numbers usually share a cache and a memory controller; a rank that its launcher
    has bound to cores of its own keeps them all. With fewer cores than ranks everyone keeps
    everything and shares.
    """
    mine = affinities[local_rank]
    rivals = [rank for rank, cores in enumerate(affinities) if cores & mine]
    cores = sorted(mine)
    if len(cores) < len(rivals):
        return CoreShare(tuple(cores), exclusive=False)
    place = rivals.index(local_rank)
    start = place * len(cores) // len(rivals)
    end = (place + 1) * len(cores) // len(rivals)
    return CoreShare(tuple(cores[start:end]), exclusive=True)


def threads_for(world: World, requested: int | None) -> int:
    """Threads of this rank's team: `requested`, or one for each core of its share.

    Never more than the cores of the share, and one if these are shared with other ranks: the
    team's barriers spin, so a thread without a core would stop all others.
    """
    limit = len(world.cores.cores) if world.cores.exclusive else 1
    return limit if requested is None else max(1, min(requested, limit))


def prepare_threads(
    world: World, threads: int, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set the process up for a team of `threads`; call before the OpenMP runtime is loaded.

    Binds the process to its share of the cores if no other rank runs on them, and sets the
    runtime's environment (https://openmp.llvm.org, "Environment Variables") as far as the user
    has not. The team's size itself is passed with each call of compiled code.
    """
    exclusive = world.cores.exclusive
    if exclusive and world.local_size > 1 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, world.cores.cores)
    # Milliseconds that a worker spins after a step. On shared cores it would spin on the time of
    # the rank that works; on its own it bridges the gap between two steps of one rank.
    environ.setdefault("KMP_BLOCKTIME", "50" if exclusive else "0")
    if not any(choice in environ for choice in _BINDING_CHOICES):
        # Next to each other, one thread a physical core before the second hardware thread of any.
        bind = exclusive and threads > 1
        environ["KMP_AFFINITY"] = (
            "nowarnings,granularity=fine,compact,1,0" if bind else "nowarnings,none"
        )
