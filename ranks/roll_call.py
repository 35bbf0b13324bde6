"""Who still runs? Rank 0 asks when a step is overdue, to tell a slow rank from a dead one.

A rank answers whenever it receives a step or waits for one. One that computes for too long is ended
by its own `Watchdog`; so a rank that neither answers nor ends is stopped or out of reach.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_CALL, _ANSWER = 2, 3  # tags


class RollCall:
    """Rank 0's side. A call that has not been answered stays open; nobody is called twice."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._open: dict[int, tuple[Any, Any, np.ndarray]] = {}

    def ask(self) -> None:
        """Call every other rank that does not have a call to answer already."""
        for rank in range(1, self._comm.Get_size()):
            if rank not in self._open:
                memory = np.zeros(2, np.uint8)
                answer = self._comm.Irecv(memory[:1], rank, _ANSWER)
                call = self._comm.Isend(memory[1:], rank, _CALL)
                self._open[rank] = (answer, call, memory)

    def silent(self) -> list[int]:
        """The ranks that have not answered yet."""
        for rank, (answer, call, _) in list(self._open.items()):
            if answer.Test() and call.Test():
                del self._open[rank]
        return sorted(self._open)


def answer(comm: Any) -> None:
    """The other ranks' side: answer if called."""
    if comm.Iprobe(0, _CALL):
        memory = np.zeros(1, np.uint8)
        comm.Recv(memory, 0, _CALL)
        comm.Send(memory, 0, _ANSWER)
