"""The cache on disk: plans, MLIR sources and objects, found by content keys.

    plans/KEY.json       the plan of a model for a target
    plans/KEY.graph.json its graph
    sources/KEY/         the MLIR of one object, readable, with an index that has its checksums
    objects/KEY.bpo      a checksum and an object file
    locks/KEY            who builds it now

Files appear whole (written beside, then renamed); what its checksum does not fit counts as missing.
Several processes may use one cache at once: whoever holds a key's lock builds, the others wait.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from buddy_pipeline.partition.errors import UserError

_MAGIC = b"buddy-pipeline object 1\n"


def default_cache_dir() -> Path:
    """The user's cache folder (XDG), in a folder of our own."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "buddy-pipeline"


@dataclass(frozen=True)
class Cache:
    """One cache folder."""

    root: Path

    @staticmethod
    def open(root: Path | None) -> "Cache":
        """The cache at `root` (default: the user's), created if need be; UserError if it cannot
        be written."""
        cache = Cache((root or default_cache_dir()).expanduser().absolute())
        try:
            for folder in ("plans", "sources", "objects", "locks"):
                (cache.root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cache._refused(error) from error
        return cache

    def plan_path(self, key: str) -> Path:
        """Where a plan lies."""
        return self.root / "plans" / f"{key}.json"

    def graph_path(self, key: str) -> Path:
        """Where the graph lies that a plan was made from."""
        return self.root / "plans" / f"{key}.graph.json"

    def source_folder(self, key: str) -> Path:
        """Where an object's MLIR lies."""
        return self.root / "sources" / key

    def object_path(self, key: str) -> Path:
        """Where an object lies."""
        return self.root / "objects" / f"{key}.bpo"

    def read_plan(self, key: str) -> str | None:
        """A plan's text, or None."""
        try:
            return self.plan_path(key).read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def read_object(self, key: str) -> bytes | None:
        """An object file's bytes; None if it is missing, unreadable, cut short or altered."""
        try:
            data = self.object_path(key).read_bytes()
        except OSError:
            return None
        start = len(_MAGIC) + 32
        if not data.startswith(_MAGIC) or len(data) <= start:
            return None
        payload = data[start:]
        whole = hashlib.sha256(payload).digest() == data[len(_MAGIC) : start]
        return payload if whole else None

    def write_object(self, key: str, payload: bytes) -> None:
        """Stores an object file under its key; errors as in `write`."""
        checksum = hashlib.sha256(payload).digest()
        self.write(self.object_path(key), _MAGIC + checksum + payload)

    def write(self, path: Path, data: bytes) -> None:
        """Stores a file of this cache; UserError if the folder is read-only or full."""
        try:
            write_atomically(path, data)
        except OSError as error:
            raise self._refused(error) from error

    @contextlib.contextmanager
    def lock(self, key: str, wait: bool = True) -> Iterator[bool]:
        """Held while a key is built; yields whether this process has it (always, with `wait`).

        Waiting polls, so that a rank that only waits can be interrupted and leaves the core alone.
        The operating system releases the lock of a process that dies. Raises UserError if the
        folder is read-only or full.
        """
        try:
            file = open(self.root / "locks" / key, "w")  # noqa: SIM115 (closed by the `with` below)
        except OSError as error:
            raise self._refused(error) from error
        with file:
            while not (mine := _try_lock(file)) and wait:
                time.sleep(0.05)
            yield mine  # closing the file gives the lock back

    def _refused(self, error: OSError) -> UserError:
        return UserError(
            f"cache folder '{self.root}' cannot be used: {error.strerror}; "
            "give another one with --cache-dir"
        )


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile's: its files are private, but others may share a cache.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(unfinished, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
