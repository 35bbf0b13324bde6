"""Writing a safetensors file piece by piece, so that no tensor need be in memory as a whole."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

#: The header is padded with blanks to a multiple of this, so that tensors can be read aligned.
_ALIGNMENT = 64
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class Entry:
    """A tensor that a file will hold."""

    name: str
    dtype: str
    """safetensors' name of it."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * _DTYPE_BYTES[self.dtype]


class SafetensorsWriter:
    """A file whose tensors are written in pieces, in any order; see `writing_safetensors`."""

    def __init__(self, file: BinaryIO, starts: Mapping[str, int], row_bytes: Mapping[str, int]):
        self._file = file
        self._starts = starts
        self._row_bytes = row_bytes

    def write(self, name: str, first: int, rows: np.ndarray) -> None:
        """Writes rows `first`, first + 1, … of a tensor, C-contiguous and of its type."""
        self._file.seek(self._starts[name] + first * self._row_bytes[name])
        self._file.write(np.ascontiguousarray(rows).data)


def file_bytes(entries: Sequence[Entry]) -> int:
    """The size of a file of these tensors, header included."""
    return _layout(entries)[2]


@contextmanager
def writing_safetensors(path: Path, entries: Sequence[Entry]) -> Iterator[SafetensorsWriter]:
    """A writer of a file that appears under its name when all is written, and not otherwise.

    Raises OSError as writing does.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    header, starts, size = _layout(entries)
    row_bytes = {e.name: e.bytes // e.shape[0] if e.shape else e.bytes for e in entries}
    try:
        with temporary.open("wb") as file:
            file.write(header)
            file.truncate(size)
            yield SafetensorsWriter(file, starts, row_bytes)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _layout(entries: Sequence[Entry]) -> tuple[bytes, dict[str, int], int]:
    """The header, where each tensor's data starts in the file, and the file's size."""
    described, offsets, at = {}, {}, 0
    for entry in entries:
        offsets[entry.name] = at
        described[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.bytes],
        }
        at += entry.bytes
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return (
        header,
        {name: len(header) + offset for name, offset in offsets.items()},
        len(header) + at,
    )
