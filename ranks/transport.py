"""The ring of ranks: messages arrive from the next higher rank and leave to the next lower one.

Rank 0 starts every message and sends it to rank world-1, so the way back to the first block is an
edge of the ring like any other. Receives and sends are nonblocking: the receive of the next message
is posted before the current step runs, and a send is waited for only when its buffer is needed
again. Waiting polls with back-off, see `waiting` and `arrivals`.

The MPI library moves messages only while it is called, so between hosts a message beyond the eager
limit (a prefill chunk; a decode step stays below) may wait until the sender's current step ends. A
thread that calls the library meanwhile was tried and dropped: on one host, where the receiver
copies without the sender's help, it cost a prefill 11 %; over TCP it gained at most as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from buddy_pipeline.ranks.arrivals import Arrivals
from buddy_pipeline.ranks.messages import Bounds, Kind, ProtocolError, Step, StepBuffer
from buddy_pipeline.ranks.roll_call import Attendance, RollCall
from buddy_pipeline.ranks.waiting import EXCLUSIVE, SHARED, Patience, sharpen_sleep
from buddy_pipeline.ranks.world import World

_TAG = 1
_RECEIVE_BUFFERS = 2  # one that the stage works on, one that the next message arrives in
_SEND_BUFFERS = 2  # one on its way, one that the stage writes
_LOOKS_S = 0.5  # how often rank 0, while it waits, looks whether everyone has answered


def buffers_of(rank: int, world: int, in_flight: int) -> tuple[int, int]:
    """Buffers of a rank for messages that arrive and for those that leave.

    Rank 0 never waits to send: besides the steps, one control message may be under way. Alone it
    receives what it sent.
    """
    receive = _RECEIVE_BUFFERS if world > 1 else 0
    return receive, in_flight + 1 if rank == 0 else _SEND_BUFFERS


class Transport:
    """This rank's two edges of the ring.

    max_tokens, max_rows, max_changes: the most a step may carry.
    input_bytes, output_bytes: payload a token of the messages that arrive and that leave.
    bounds: what a received step may refer to.
    in_flight: steps that rank 0 may start before it must receive the oldest.
    part: in the roll call, where a rank that is not heard ends the job; None waits for ever.

    A Step returned by `receive` is valid until the next `receive`; one returned by `begin` or
    `carry_on` until it is sent.
    """

    def __init__(
        self,
        world: World,
        max_tokens: int,
        max_rows: int,
        input_bytes: int,
        output_bytes: int,
        bounds: Bounds,
        *,
        max_changes: int,
        in_flight: int,
        part: RollCall | Attendance | None = None,
    ) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = world.comm
        self._source = (world.rank + 1) % world.world
        self._target = (world.rank - 1) % world.world
        self._bounds = bounds
        self._part = part
        self._patience = EXCLUSIVE if world.cores.exclusive else SHARED
        self._arrivals = EXCLUSIVE if world.cores.exclusive else Arrivals()
        sharpen_sleep()

        control_bytes = 8 * world.world  # PEAK_MEMORY: one word a rank
        receive_buffers, send_buffers = buffers_of(world.rank, world.world, in_flight)

        def parcels(count: int, bytes_per_token: int) -> list[_Parcel]:
            sizes = (max_tokens, max_rows, bytes_per_token, control_bytes, max_changes)
            return [_Parcel(StepBuffer(*sizes)) for _ in range(count)]

        self._incoming = parcels(receive_buffers, input_bytes)
        self._outgoing = parcels(send_buffers, output_bytes)
        self._received = 0
        self._sent = 0
        self._status = MPI.Status()
        self._pending: Any = self._post_receive(self._incoming[0])

    def receive(self) -> Step:
        """Wait for the next message, check it and return it, the receive of its successor posted.

        Raises ProtocolError for a malformed message or one out of order, SilentRank if a rank is
        stopped or out of reach (as do all methods that wait), MPI.Exception if the MPI library
        reports that the neighbour is gone.
        """
        if self._pending is None:
            raise ProtocolError("receive after STOP: no message follows it")
        try:
            # What is still on its way from here gets on only while the library is called.
            arrivals = self._arrivals if self._has_sent_all() else self._patience
            self._until(lambda: self._pending.Test(self._status), arrivals)
        except self._mpi.Exception as error:
            if error.Get_error_class() != self._mpi.ERR_TRUNCATE:
                raise
            capacity = self._incoming[0].buffer.capacity
            raise ProtocolError(
                f"message from rank {self._source} is longer than {capacity} bytes, "
                "the most that a message here can have"
            ) from error
        parcel = self._incoming[self._received % _RECEIVE_BUFFERS]
        count = self._status.Get_count(self._mpi.BYTE)
        try:
            step = parcel.buffer.decode(count, self._bounds)
        except ProtocolError as error:
            raise ProtocolError(f"from rank {self._source}: {error}") from None
        if step.sequence != self._received:
            raise ProtocolError(
                f"from rank {self._source}: message {step.sequence}, expected {self._received}"
            )
        self._received += 1
        self._pending = None
        if step.kind is not Kind.STOP:
            self._pending = self._post_receive(self._incoming[self._received % _RECEIVE_BUFFERS])
        return step

    def begin(self, kind: Kind, tokens: int = 0, rows: int = 0, changes: int = 0) -> Step:
        """Start a new message on rank 0; the caller fills its arrays, then calls `send`."""
        return self._free_buffer().begin(kind, self._sent, tokens, rows, changes=changes)

    def carry_on(self, step: Step, payload: int = 0) -> Step:
        """Start the message that carries a received step to the next rank, payload to be filled."""
        return self._free_buffer().carry_on(step, payload)

    def send(self, step: Step) -> None:
        """Send the message begun last, without waiting for its receiver."""
        self._outgoing[self._sent % len(self._outgoing)].request = self._post_send(step)
        self._sent += 1

    def forward(self, step: Step) -> None:
        """Send the message received last as it is, from the buffer it arrived in."""
        self._incoming[(self._received - 1) % _RECEIVE_BUFFERS].request = self._post_send(step)

    def close(self) -> None:
        """Wait until everything sent has left; call after STOP was received."""
        for parcel in (*self._incoming, *self._outgoing):
            self._settle(parcel)
        if isinstance(self._part, RollCall):
            self._part.close()

    def _free_buffer(self) -> StepBuffer:
        parcel = self._outgoing[self._sent % len(self._outgoing)]
        self._settle(parcel)
        return parcel.buffer

    def _post_receive(self, parcel: _Parcel) -> Any:
        self._settle(parcel)  # it may still be on its way on, if it was forwarded
        return self._comm.Irecv([parcel.buffer.memory, self._mpi.BYTE], self._source, _TAG)

    def _post_send(self, step: Step) -> Any:
        return self._comm.Isend([step.message, self._mpi.BYTE], self._target, _TAG)

    def _has_sent_all(self) -> bool:
        return all(parcel.has_left() for parcel in (*self._incoming, *self._outgoing))

    def _settle(self, parcel: _Parcel) -> None:
        if not parcel.has_left():
            self._until(parcel.has_left, self._patience)

    def _until(self, done: Callable[[], bool], patience: Patience | Arrivals) -> None:
        """Wait, answering rank 0's calls: also a send may wait for the rank that is asked after."""
        part = self._part
        if isinstance(part, Attendance):

            def done_here() -> bool:
                part.attend()
                return done()

            patience.until(done_here)
        elif part is not None:
            while not patience.until(done, _LOOKS_S):
                part.attend()
        else:
            patience.until(done)


class _Parcel:
    """A buffer and the send that reads it, if one is under way."""

    def __init__(self, buffer: StepBuffer) -> None:
        self.buffer = buffer
        self.request: Any = None

    def has_left(self) -> bool:
        """Whether no send reads the buffer any more."""
        if self.request is not None and self.request.Test():
            self.request = None
        return self.request is None


class Loopback:
    """The ring of a world of one: what rank 0 sends is what it receives next. Needs no MPI."""

    def __init__(
        self, max_tokens: int, max_rows: int, *, max_changes: int, in_flight: int = 1
    ) -> None:
        self._buffers = [
            StepBuffer(max_tokens, max_rows, 0, max_changes=max_changes)
            for _ in range(buffers_of(0, 1, in_flight)[1])
        ]
        self._sent = 0
        self._steps: deque[Step] = deque()

    def begin(self, kind: Kind, tokens: int = 0, rows: int = 0, changes: int = 0) -> Step:
        buffer = self._buffers[self._sent % len(self._buffers)]
        return buffer.begin(kind, self._sent, tokens, rows, changes=changes)

    def send(self, step: Step) -> None:
        self._steps.append(step)
        self._sent += 1

    def receive(self) -> Step:
        if not self._steps:
            raise ProtocolError("receive in a world of one before anything was sent")
        return self._steps.popleft()

    def close(self) -> None:
        """Nothing is ever under way."""
