"""The MLIR of one object: what the planner writes, people read and the worker compiles."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.versions import source_digest

INDEX = "index.json"


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

    def write(self, folder: Path, write: Callable[[Path, bytes], None]) -> None:
        """Writes the files, and last an index that `read_source` starts from."""
        for name, text in self.files().items():
            write(folder / name, text.encode())
        index = {
            "name": self.name,
            "symbols": self.symbols,
            "islands": [symbol for symbol, _ in self.islands],
        }
        write(folder / INDEX, json.dumps(index).encode())


def read_source(folder: Path) -> Source:
    """What `Source.write` wrote; OSError if a file is missing, ValueError if the index is bad."""
    index = json.loads((folder / INDEX).read_text())
    try:
        name, symbols, islands = str(index["name"]), tuple(index["symbols"]), index["islands"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is malformed: {error!r}") from error
    return Source(
        name=name,
        symbols=symbols,
        module=(folder / f"{name}.mlir").read_text(),
        islands=tuple((symbol, (folder / f"{symbol}.mlir").read_text()) for symbol in islands),
    )
