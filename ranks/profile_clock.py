"""One clock for all ranks: how far each rank's is ahead of rank 0's."""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from buddy_pipeline.ranks.waiting import EXCLUSIVE, SHARED
from buddy_pipeline.ranks.world import World

_ROUNDS = 20
_TAG = 2


class Offset(NamedTuple):
    """How far a rank's `time.perf_counter_ns` is ahead of rank 0's, and how sure that is, ns."""

    ns: float
    error: float


def estimate_offset(world: World) -> Offset:
    """This rank's offset to rank 0; every rank must call this.

    Rank 0 asks each rank for its time again and again; an answer was given somewhere between
    question and arrival, so the quickest round tells most (Cristian's algorithm, Distributed
    Computing 3, 1989).
    """
    if world.comm is None:
        return Offset(0.0, 0.0)
    if world.rank != 0:
        return _answer(world)
    for rank in range(1, world.world):
        _ask(world, rank)
    return Offset(0.0, 0.0)


def _ask(world: World, rank: int) -> None:
    best = Offset(0.0, float("inf"))
    for _ in range(_ROUNDS):
        asked = perf_counter_ns()
        _send(world, rank, [0.0, 0.0])
        theirs = _receive(world, rank)[0]
        arrived = perf_counter_ns()
        error = (arrived - asked) / 2
        if error < best.error:
            best = Offset(theirs - (asked + arrived) / 2, error)
    _send(world, rank, list(best))


def _answer(world: World) -> Offset:
    for _ in range(_ROUNDS):
        _receive(world, 0)
        _send(world, 0, [float(perf_counter_ns()), 0.0])
    return Offset(*_receive(world, 0))


def _send(world: World, rank: int, pair: list[float]) -> None:
    world.comm.Send(np.array(pair, np.float64), rank, _TAG)


def _receive(world: World, rank: int) -> list[float]:
    pair = np.empty(2, np.float64)
    request = world.comm.Irecv(pair, rank, _TAG)
    (EXCLUSIVE if world.cores.exclusive else SHARED).until(request.Test)
    return pair.tolist()
