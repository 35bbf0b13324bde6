"""Records that all ranks give each other outside of steps, as MessagePack: never as pickles.

Whoever is first waits by polling and leaves its cores to those that still work.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

from buddy_pipeline.ranks.messages import ProtocolError
from buddy_pipeline.ranks.waiting import IDLE

_T = TypeVar("_T")

#: Bytes of one rank's record; the largest, a profile's latest spans, take about one million.
MOST_BYTES = 1 << 28


def all_gather(comm: Any, record: _T, kind: type[_T]) -> list[_T]:
    """Every rank's record, by rank, on every rank; all must call this.

    record: a dataclass, tuple, mapping or whatever else msgspec knows; NumPy arrays of float64 too.
    kind: its type, which what arrives is checked against.

    Raises ProtocolError for a record that is too long or of another type.
    """
    return _decoded(_exchange(comm, record, root=None), kind)


def gather(comm: Any, record: _T, kind: type[_T]) -> list[_T]:
    """As `all_gather`, but rank 0 alone gets the records; an empty list for all others."""
    return _decoded(_exchange(comm, record, root=0), kind)


def send_record(comm: Any, record: object, rank: int, tag: int) -> None:
    """Sends a record to one rank, which receives it with `receive_record`."""
    comm.Send(np.frombuffer(encode(record), np.uint8), rank, tag)


def receive_record(comm: Any, kind: type[_T], rank: int, tag: int) -> _T:
    """The next record of a rank; waits by polling. Errors as in `all_gather`."""
    from mpi4py import MPI

    status = MPI.Status()
    IDLE.until(lambda: bool(comm.Iprobe(rank, tag, status)))
    size = status.Get_count(MPI.BYTE)
    if size > MOST_BYTES:
        raise ProtocolError(f"a record of {size} bytes; at most {MOST_BYTES} are taken")
    data = np.empty(size, np.uint8)
    comm.Recv(data, rank, tag)
    return decode(data.tobytes(), kind)


def _exchange(comm: Any, record: object, root: int | None) -> list[bytes]:
    mine = np.frombuffer(encode(record), np.uint8)
    sizes = np.empty(comm.Get_size(), np.int64)
    IDLE.until(comm.Iallgather(np.array([len(mine)], np.int64), sizes).Test)
    if sizes.min() < 0 or sizes.max() > MOST_BYTES:
        raise ProtocolError(f"records of {sizes.tolist()} bytes; at most {MOST_BYTES} are taken")
    ends = np.cumsum(sizes)
    here = root is None or comm.Get_rank() == root
    everything = np.empty(int(ends[-1]) if here else 0, np.uint8)
    into = [everything, (sizes, ends - sizes)] if here else None
    request = comm.Iallgatherv(mine, into) if root is None else comm.Igatherv(mine, into, root)
    IDLE.until(request.Test)
    if not here:
        return []
    return [part.tobytes() for part in np.split(everything, ends[:-1])]


def encode(record: object) -> bytes:
    """The record as it travels."""
    return msgspec.msgpack.encode(record, enc_hook=_array_to_plain)


def decode(data: bytes, kind: type[_T]) -> _T:
    """The record back; ProtocolError if these bytes are none of this type."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_array_of_plain)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ProtocolError(f"a record that is no {kind}: {error}") from None


def _decoded(parts: list[bytes], kind: type[_T]) -> list[_T]:
    return [decode(part, kind) for part in parts]


def _array_to_plain(value: object) -> object:
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        return [list(value.shape), value.tobytes()]
    raise NotImplementedError(f"{type(value)} cannot be sent")


def _array_of_plain(kind: type, plain: Any) -> object:
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind} cannot be received")
    shape, data = plain
    return np.frombuffer(data, np.float64).reshape(shape)
