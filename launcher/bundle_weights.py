"""Weight files in a bundle: what is known of each, checked in part at every start, or wholly.

They are mapped, gigabytes of them, so a start reads only their sizes and some pages of each.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buddy_pipeline.ranks.mapped_weights import map_file

#: Pages of a file whose bytes every start looks at: evenly spread, the first and the last among
#: them, so that a file that was cut, shifted or exchanged cannot pass.
_SAMPLES = 16
_PAGE = 4096
_PIECE = 1 << 20


@dataclass(frozen=True)
class WeightFile:
    """A weight file as it was packed."""

    bytes: int
    sample: str
    """SHA-256 of the pages that a start looks at."""
    sha256: str
    """Of all of it."""


def describe_weights(path: Path) -> WeightFile:
    """What a bundle keeps of a file; reads all of it."""
    data = map_file(path)
    return WeightFile(len(data), _sample(data), _whole(data))


def start_fault(data: np.ndarray, described: WeightFile) -> str | None:
    """What is wrong with a file's bytes (uint8) as far as a start looks; None if nothing is."""
    if len(data) != described.bytes:
        return f"it has {len(data):,} bytes, but {described.bytes:,} were packed"
    return None if _sample(data) == described.sample else "its bytes were changed"


def whole_fault(data: np.ndarray, described: WeightFile) -> str | None:
    """What is wrong with a file's bytes (uint8), all of which are read; None if nothing is."""
    if len(data) == described.bytes and _whole(data) == described.sha256:
        return None
    return start_fault(data, described) or "its bytes were changed"


def _sample(data: np.ndarray) -> str:
    digest = hashlib.sha256()
    last = max(0, len(data) - _PAGE)
    for start in dict.fromkeys(last * i // (_SAMPLES - 1) for i in range(_SAMPLES)):
        digest.update(data[start : start + _PAGE].tobytes())
    return digest.hexdigest()


def _whole(data: np.ndarray) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(data):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(data: np.ndarray) -> Iterator[memoryview]:
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE].data
