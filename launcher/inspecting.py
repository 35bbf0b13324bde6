"""The `inspect` command: what a build directory, an object, a weight file or a bundle holds."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.object_file import read_object_file
from buddy_pipeline.compile.partition_manifest import PartitionManifest, parse_manifest
from buddy_pipeline.launcher.build_config import BuildConfig, load_config
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.weight_manifest import MANIFEST as WEIGHTS_MANIFEST
from buddy_pipeline.ranks.weight_manifest import read_weights_manifest, unusable


@dataclass
class Table:
    """A heading, facts and rows; `data` is the same for machines."""

    facts: Mapping[str, object]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    data: Any = field(default=None)

    def text(self) -> str:
        """Lines of aligned columns."""
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        cells = [[str(cell) for cell in row] for row in (self.columns, *self.rows)]
        if self.columns:
            widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
            lines += [
                "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
                for row in cells
            ]
        return "\n".join(lines) + "\n"


def inspect_command(path: Path, as_json: bool, verify: bool) -> int:
    """Prints a table, or JSON; `verify` first reads all of a bundle.

    UserError for what it does not know, and for what is not as it was written.
    """
    if verify:
        _verify_bundle(path)
    table = _table(path)
    print(json.dumps(table.data, indent=1) if as_json else table.text(), end="\n" * as_json)
    return 0


def _table(path: Path) -> Table:
    if not path.exists():
        raise UserError(f"{path} does not exist: give a build directory or a file from one")
    if path.is_dir():
        if BuildDirectory(path).manifest.exists():
            return _manifest_table(BuildDirectory(path).read_manifest())
        if (path / WEIGHTS_MANIFEST).exists():
            return _weights_table(path / WEIGHTS_MANIFEST)
    elif path.name == WEIGHTS_MANIFEST:
        return _weights_table(path)
    elif path.name == BuildDirectory(path.parent).config.name:
        return _config_table(load_config(path))
    elif path.suffix == ".json":
        return _manifest_file(path)
    elif path.suffix == ".bin":
        return _weights_table(path.with_name(WEIGHTS_MANIFEST), only=path.name)
    elif path.suffix == ".o":
        return _object_table(path)
    elif path.suffix == ".zip":
        return _bundle_table(path)
    return _checkpoint_table(path)


def _manifest_file(path: Path) -> Table:
    try:
        return _manifest_table(parse_manifest(path.read_bytes()))
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except ValueError as error:
        why = str(error)
    raise UserError(
        f"{path} {why}: inspect shows a partition_manifest.json as 'buddy-pipeline import' wrote it"
    )


def _config_table(config: BuildConfig) -> Table:
    granularity, defaults = config.granularity, config.defaults
    facts = {
        "spec": config.spec,
        "model": f"{config.model_path}, {config.family}",
        "variant": config.variant,
        "layers": config.layers,
        "context": config.context,
        "strategy": f"{granularity.strategy}, code shared by {granularity.sharing.value}",
        "target": f"{config.target.cpu} ({config.target.triple})",
        "threads": defaults.threads or "a share of the host's cores",
        "prompt tokens in a step": defaults.prefill_chunk or "as suits the ranks",
        "KV tiers": ", ".join(map(str, defaults.kv_tiers)),
    }
    return Table(facts, data=json.loads(config.to_json()))


def _manifest_table(manifest: PartitionManifest) -> Table:
    rows = [
        [
            entry.number,
            entry.name,
            ",".join(map(str, entry.owner_ranks)),
            entry.source,
            entry.files["prefill"],
            entry.files["decode"],
        ]
        for entry in manifest.partitions
    ]
    compiled = sum(entry.bytes or 0 for entry in manifest.objects)
    facts = {
        "strategy": f"{manifest.strategy}, code shared by {manifest.sharing}",
        "variant": manifest.variant,
        "ranks": f"{', '.join(map(str, manifest.ranks))} of {manifest.world}",
        "layers by rank": ", ".join(map(str, manifest.split)),
        "counts": ", ".join(f"{value} {name}" for name, value in manifest.counts.items()),
        "objects": f"{compiled} bytes" if compiled else "not compiled",
        "phases": manifest.shared_by_phases,
    }
    columns = ("number", "partition", "rank", "code", "prefill", "decode")
    return Table(facts, columns, rows, asdict(manifest))


def _object_table(path: Path) -> Table:
    try:
        found = read_object_file(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no object file of ours ({error}): compile again") from None
    rows = [
        [
            symbol.name,
            "function" if symbol.is_function else "data",
            "exported"
            if symbol.is_global and symbol.is_defined
            else "local"
            if symbol.is_defined
            else "needed",
            symbol.bytes,
        ]
        for symbol in found.symbols
    ]
    facts = {
        "object": found.note or "made by another program",
        "machine": found.machine,
        "size": f"{path.stat().st_size} bytes, {found.code_bytes} of code",
    }
    return Table(facts, ("symbol", "kind", "binding", "bytes"), rows, asdict(found))


def _weights_table(path: Path, only: str | None = None) -> Table:
    manifest = read_weights_manifest(path.parent)
    if manifest is None:
        raise UserError(unusable(path.parent))
    files = {n: f for n, f in manifest["files"].items() if only in (None, n)}
    rows = [[name, len(f["parameters"]), f["bytes"]] for name, f in files.items()]
    source = manifest["source"]
    facts = {"made from": source["path"], "variant": source["variant"]}
    return Table(facts, ("file", "parameters", "bytes"), rows, {**manifest, "files": files})


def _bundle_table(path: Path) -> Table:
    from buddy_pipeline.launcher.bundle import Bundle

    bundle = Bundle(path)
    config = bundle.config
    facts = {
        "rank": f"{bundle.rank} of {bundle.world}",
        "layers by rank": ", ".join(map(str, bundle.split)),
        "model": f"{config.family}, {counted(config.layers, 'layer')}, {config.variant}",
        "CPU": f"{config.target.cpu} ({config.target.triple})",
    }
    sizes = bundle.sizes()
    return Table(facts, ("file", "bytes"), list(sizes.items()), {**facts, "files": sizes})


def _verify_bundle(path: Path) -> None:
    from buddy_pipeline.launcher.bundle import Bundle

    if path.suffix != ".zip":
        raise UserError(
            f"--verify reads a bundle, which {path} is not: for a build directory there is"
            " 'buddy-pipeline verify --build-dir'"
        )
    count = Bundle(path).verify()
    print(f"{path}: all {count} files are as they were packed", file=sys.stderr)


def _checkpoint_table(path: Path) -> Table:
    from buddy_pipeline.ranks.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    rows = [[t.name, t.dtype, "x".join(map(str, t.shape))] for t in checkpoint.tensors.values()]
    facts = {"model": checkpoint.config.get("model_type"), "elements": checkpoint.element_count()}
    data = {**facts, "tensors": [asdict(t) for t in checkpoint.tensors.values()]}
    return Table(facts, ("tensor", "type", "shape"), rows, data)
