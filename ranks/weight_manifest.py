"""The manifest of packed weights: which files there are, what is in them and of what they are made.

`.buddy_weights_manifest.json` has, sealed:

    source   path, variant, and size and time of change of each of the checkpoint's files
    files    by name: bytes, mtime_ns, sha256, and the offset of each parameter by `parameter_key`
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buddy_pipeline.compile.cache import write_atomically
from buddy_pipeline.compile.manifest import Parameter
from buddy_pipeline.partition.sealed_json import seal, unseal

MANIFEST = ".buddy_weights_manifest.json"
#: Raised whenever packed bytes or a field change their meaning.
_FORMAT_VERSION = 3


def write_weights_manifest(
    folder: Path, source: Mapping[str, Any], files: Mapping[str, Any]
) -> None:
    """Writes a folder's manifest whole or not at all; OSError if it cannot be."""
    content = seal(_FORMAT_VERSION, {"source": source, "files": files})
    write_atomically(folder / MANIFEST, json.dumps(content, indent=1).encode())


def read_weights_manifest(folder: Path) -> dict[str, Any] | None:
    """The `source` and `files` of a folder's manifest; None if it has none that can be used."""
    try:
        return unseal(_FORMAT_VERSION, (folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None


def unusable(folder: Path) -> str:
    """What to say where `read_weights_manifest` has nothing."""
    return (
        f"{folder / MANIFEST} is missing, of another version, or was changed after it was written:"
        f" {_IMPORT}"
    )


@dataclass(frozen=True)
class WeightsReport:
    """What `check_weights` saw."""

    files: int
    """Those that the manifest names."""
    faults: tuple[str, ...]
    """One line each, with what mends it."""


def check_weights(folder: Path) -> WeightsReport:
    """Reads every file that the folder's manifest names, and compares it with that.

    A folder in which nothing was packed has neither files nor faults.
    """
    manifest = read_weights_manifest(folder)
    if manifest is None:
        packed = (folder / MANIFEST).exists() or any(folder.glob("*.bin"))
        return WeightsReport(0, (unusable(folder),) if packed else ())
    files = manifest["files"]
    faults = tuple(fault for name in files for fault in _faults(folder / name, files[name]))
    return WeightsReport(len(files), faults)


def _faults(path: Path, entry: Mapping[str, Any]) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["bytes"]:
                yield f"{path} has {size:,} bytes, but {entry['bytes']:,} were written: {_IMPORT}"
                return
            changed = hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]
    except OSError as error:
        yield f"{path} cannot be read ({error.strerror}): {_IMPORT}"
        return
    if changed:
        # An import looks at sizes and times only, and would keep a file whose bytes have rotted.
        yield (
            f"{path} was changed since it was written:"
            " run 'buddy-pipeline import --no-reuse-weights' again"
        )


_IMPORT = "run 'buddy-pipeline import' again"


def parameter_key(parameter: Parameter) -> str:
    """What a parameter's packed bytes depend on, besides the source."""
    return hashlib.sha256(json.dumps(asdict(parameter)).encode()).hexdigest()[:32]


def describe_source(path: Path, variant: str) -> dict[str, Any]:
    """The files of a checkpoint as they are now."""
    files = {file.name: describe_stat(file) for file in _source_files(path)}
    return {"path": str(path.resolve()), "variant": variant, "files": files}


def _source_files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted([*path.glob("*.safetensors*"), *path.glob("config.json")])
    else:
        yield path


def describe_stat(path: Path) -> dict[str, int]:
    """Size and time of change of a file; OSError if there is none."""
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def is_unchanged(path: Path, entry: Mapping[str, Any]) -> bool:
    """Whether a file has the size and the time of change that its entry has; reads nothing."""
    if not path.is_file():
        return False
    return describe_stat(path) == {name: entry[name] for name in ("bytes", "mtime_ns")}
