"""How many positions the KV cache may hold: as many as fit on every rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil

from buddy_pipeline.ranks.waiting import IDLE
from buddy_pipeline.ranks.world import World

_SHARE = 0.8
"""Of the memory that is free once the weights are loaded: the rest is for buffers, the page cache
and the copy that a slot makes when it grows."""
_CGROUP = Path("/sys/fs/cgroup")  # version 2, as a container sees its own


def kv_positions(world: World, position_bytes: int, limit: int | None) -> int:
    """Positions that the KV cache has room for on every rank; all ranks call this together.

    position_bytes: what one position takes in the layers of this rank.
    limit: bytes that the cache may take on a rank; None shares out what is free on its host.
    """
    memory = int(available_memory() * _SHARE) // world.local_size if limit is None else limit
    # A rank without attention layers has room for any number.
    most = int(np.iinfo(np.int64).max)
    mine = np.array([min(memory // position_bytes, most) if position_bytes else most])
    if world.comm is None:
        return int(mine[0])
    from mpi4py import MPI

    least = np.empty_like(mine)
    request = world.comm.Iallreduce(mine, least, op=MPI.MIN)
    IDLE.until(request.Test)
    return int(least[0])


def available_memory() -> int:
    """Bytes that this process may still take: of the host, and of its container if it is in one."""
    free: int = psutil.virtual_memory().available
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if most == "max" else min(free, max(0, int(most) - used))
