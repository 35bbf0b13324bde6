"""A read-only memory map of a model file that gives its pages back."""

import mmap
from pathlib import Path

import numpy as np

from buddy_pipeline.partition.errors import UserError


class MappedFile:
    """The bytes of one file, mapped and never copied as a whole.

    Attributes:
        path: the file.
        size: its length in bytes when it was mapped.
        buffer: the map, usable wherever a bytes-like object is.
    """

    def __init__(self, path: Path) -> None:
        """Map `path`.

        Raises:
            UserError: it is not a regular file, cannot be opened, or is empty.
        """
        try:
            if not path.is_file():
                raise UserError(f"{path} is not a file; the model needs it")
            with path.open("rb") as file:
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise UserError(f"{path} is empty; download or convert it again") from None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        self.path = path
        self.size = len(self.buffer)
        self._bytes = np.frombuffer(self.buffer, dtype=np.uint8)

    def view(self, begin: int, end: int) -> np.ndarray:
        """Return bytes `begin` to `end` as a read-only uint8 [end - begin] view of the map."""
        return self._bytes[begin:end]

    def release(self, begin: int, end: int) -> None:
        """Drop the pages wholly within `begin` to `end` from this process's memory.

        They stay in the system's page cache, so reading them again is cheap. Without this a rank's
        resident memory would hold its weights twice: as on disk and as packed.
        """
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED, first, length)
