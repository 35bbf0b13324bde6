"""The build directory: what `import` and `compile` leave for people and for the next stage.

    config.json               what was resolved from the spec
    partition_manifest.json   partitions, their owner, files and hashes
    plan.json                 what a stage needs to run
    graph.json                the exported graph, for the verifier
    mlir/forward_PHASE.mlir   the combined entry of each phase
    mlir/subgraph0_PHASEN.mlir  the entry of partition N
    mlir/NAME/                the code of one object: its module and islands
    debug/PARTITION.py        scripts that run one partition alone (see compile.debug_wrappers)
    objects/NAME.o            the object files
    weights/                  packed weights and their manifest (see ranks.weight_manifest)

A stage writes its files first and the manifest last, each whole or not at all, so a stage that
fails leaves what was there usable: see `imported_files` and `compiled_files`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from buddy_pipeline.compile.cache import write_atomically
from buddy_pipeline.compile.manifest import Plan
from buddy_pipeline.compile.partition_manifest import PartitionManifest, parse_manifest
from buddy_pipeline.compile.source import Source, read_source
from buddy_pipeline.compile.target import Target
from buddy_pipeline.partition.errors import UserError

T = TypeVar("T")


def target_folder(target: Target) -> str:
    """The folder of this CPU's ranks in a build directory of ranks with different CPUs."""
    return f"{_TARGET_PREFIX}{target.cpu}-{target.digest()[:8]}"


_TARGET_PREFIX = "for-"


def directory_for(root: Path, target: Target) -> "BuildDirectory":
    """The build directory at `root`, or the one in it that was built for this CPU.

    UserError if there are some in it, but none for this CPU.
    """
    inside = sorted(path.name for path in root.glob(f"{_TARGET_PREFIX}*") if path.is_dir())
    if not inside or BuildDirectory(root).manifest.exists():
        return BuildDirectory(root)
    if target_folder(target) not in inside:
        raise UserError(
            f"build directory '{root}' has {', '.join(inside)}, but this CPU is {target.cpu}:"
            " build it on ranks with this CPU too"
        )
    return BuildDirectory(root / target_folder(target))


@dataclass(frozen=True)
class BuildDirectory:
    """One build directory."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.root / "config.json"

    @property
    def manifest(self) -> Path:
        """The partition manifest."""
        return self.root / "partition_manifest.json"

    @property
    def plan(self) -> Path:
        """The plan, with the keys of the objects here."""
        return self.root / "plan.json"

    @property
    def graph(self) -> Path:
        """The exported graph."""
        return self.root / "graph.json"

    @property
    def mlir(self) -> Path:
        """The folder of MLIR files."""
        return self.root / "mlir"

    @property
    def debug(self) -> Path:
        """The folder of debug wrappers."""
        return self.root / "debug"

    @property
    def objects(self) -> Path:
        """The folder of object files."""
        return self.root / "objects"

    @property
    def weights(self) -> Path:
        """The folder of packed weights."""
        return self.root / "weights"

    def create(self) -> None:
        """Makes the folder; UserError if that cannot be."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refused(error) from error

    def write(self, path: Path, data: bytes) -> None:
        """Stores a file of this directory, if it differs; UserError if that cannot be."""
        try:
            if not path.exists() or path.read_bytes() != data:
                write_atomically(path, data)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> UserError:
        return UserError(
            f"build directory '{self.root}' cannot be written: {error.strerror}; give another one"
            " with --build-dir"
        )

    def read_manifest(self) -> PartitionManifest:
        """The manifest; UserError if there is none, or it is of another version or was changed."""
        return self._read(self.manifest, parse_manifest)

    def read_plan(self) -> Plan:
        """The plan; UserError as for the manifest."""
        return self._read(self.plan, Plan.from_json)

    def source_size(self, name: str) -> int:
        """Bytes of the code of one object."""
        return sum(path.stat().st_size for path in (self.mlir / name).glob("*.mlir"))

    def read_source(self, name: str) -> Source:
        """The code of one object, edited or not; UserError if a file is missing."""
        folder = self.mlir / name
        try:
            return read_source(folder, edited=True)
        except OSError as error:
            why = f"has no {Path(error.filename or '').name} ({error.strerror})"
        except ValueError as error:
            why = f"is not as it was imported ({error})"
        raise UserError(f"{folder} {why}: run 'buddy-pipeline import' again")

    def _read(self, path: Path, parse: Callable[[bytes], T]) -> T:
        """A file of an import; UserError if it is missing, or not what was written."""
        try:
            return parse(path.read_bytes())
        except FileNotFoundError:
            raise UserError(
                f"build directory '{self.root}' has no {path.name}:"
                " run 'buddy-pipeline import' first"
            ) from None
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        except ValueError as error:
            why = str(error)
        raise UserError(f"{path} {why}: run 'buddy-pipeline import' again")
