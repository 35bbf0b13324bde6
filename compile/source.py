"""The MLIR of one object: what the planner writes, people read and the worker compiles."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.versions import source_digest
from buddy_pipeline.partition.sealed_json import seal, unseal

INDEX = "index.json"
#: Raised whenever the meaning of an index's field changes.
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Source:
    """One module, and the islands that are linked into it.

    `symbols` are what the object exports.
    """

    name: str
    symbols: tuple[str, ...]
    module: str
    islands: tuple[tuple[str, str], ...] = ()  # (symbol, linalg text)

    def key(self, target: Target, versions: Mapping[str, str]) -> str:
        """The content key: what is compiled, for which CPU, by which compilers and our source."""
        by = [sorted(versions.items()), source_digest()]
        text = json.dumps([asdict(self), target.digest(), by])
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def files(self) -> dict[str, str]:
        """File name to content: the module, then the islands."""
        islands = {f"{symbol}.mlir": text for symbol, text in self.islands}
        return {f"{self.name}.mlir": self.module, **islands}

    def hashes(self) -> dict[str, str]:
        """File name to the SHA-256 of its content."""
        return {
            name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.files().items()
        }

    def write(self, folder: Path, write: Callable[[Path, bytes], None]) -> None:
        """Writes the files, and last an index that `read_source` starts from."""
        for name, text in self.files().items():
            write(folder / name, text.encode())
        index = {
            "name": self.name,
            "symbols": self.symbols,
            "islands": [symbol for symbol, _ in self.islands],
            "sha256": self.hashes(),
        }
        write(folder / INDEX, json.dumps(seal(FORMAT_VERSION, index), indent=1).encode())


def read_index(folder: Path) -> dict[str, Any]:
    """The index that `Source.write` wrote; OSError and ValueError as of `read_source`."""
    try:
        return unseal(FORMAT_VERSION, (folder / INDEX).read_bytes())
    except ValueError as error:
        raise ValueError(f"{INDEX} {error}") from error


def read_source(folder: Path, *, edited: bool = False) -> Source:
    """What `Source.write` wrote; `edited` takes MLIR files that were changed since.

    Raises OSError if a file is missing, and ValueError, naming the file, if it is not what was
    written.
    """
    index = read_index(folder)
    name = index["name"]
    source = Source(
        name=name,
        symbols=tuple(index["symbols"]),
        module=(folder / f"{name}.mlir").read_text(),
        islands=tuple(
            (symbol, (folder / f"{symbol}.mlir").read_text()) for symbol in index["islands"]
        ),
    )
    for file, digest in source.hashes().items():
        if digest != index["sha256"][file] and not edited:
            raise ValueError(f"{file} was changed after it was written")
    return source


def is_whole(folder: Path) -> bool:
    """Whether `read_source` finds there what was written."""
    try:
        read_source(folder)
    except (OSError, ValueError):
        return False
    return True
