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
    weights/                  packed weights (see ranks.weight_files)

A stage writes its files first and the manifest last, each whole or not at all, so a stage that
fails leaves what was there usable.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from buddy_pipeline.compile.cache import Cache, write_atomically
from buddy_pipeline.compile.entry_files import (
    PHASES,
    emit_forward,
    emit_subgraph,
    forward_name,
    subgraph_name,
)
from buddy_pipeline.compile.manifest import Plan
from buddy_pipeline.compile.partition_manifest import (
    Entry,
    ObjectEntry,
    PartitionManifest,
    parse_manifest,
)
from buddy_pipeline.compile.source import Source, is_whole, read_source
from buddy_pipeline.compile.target import Target
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import block_role

T = TypeVar("T")
#: What the manifest says on prefill and decode.
_SHARED = (
    "Graphs are exported with one token and compiled for any number: the prefill and the decode "
    "file of a partition are entries to the same code."
)


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

    def _read(self, path: Path, parse: Callable[[str], T]) -> T:
        """A file of an import; UserError if it is missing, or not what was written."""
        try:
            return parse(path.read_text())
        except FileNotFoundError:
            raise UserError(
                f"build directory '{self.root}' has no {path.name}:"
                " run 'buddy-pipeline import' first"
            ) from None
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        except json.JSONDecodeError:
            why = "is cut short or no JSON"
        except ValueError as error:
            why = str(error)
        raise UserError(f"{path} {why}: run 'buddy-pipeline import' again")


@dataclass(frozen=True)
class Share:
    """Which ranks there are, and whose partitions are wanted."""

    ranges: tuple[range, ...]  # layers by rank
    ranks: tuple[int, ...]
    owners: Mapping[str, tuple[int, ...]]  # partition: the ranks that run it

    @staticmethod
    def of(plan: Plan, ranges: Sequence[range], ranks: Sequence[int]) -> "Share":
        """The share of `ranks` in a pipeline with these layers (index = rank)."""
        owners: dict[str, tuple[int, ...]] = {p.name: () for p in plan.partitions}
        for rank, layers in enumerate(ranges):
            for partition in plan.for_rank(layers, block_role(rank, len(ranges))):
                owners[partition.name] += (rank,)
        return Share(tuple(ranges), tuple(ranks), owners)

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of each rank."""
        return tuple(len(layers) for layers in self.ranges)


def write_imported(
    directory: BuildDirectory,
    plan: Plan,
    cache: Cache,
    share: Share,
    config_digest: str,
    full_mlir: bool,
) -> PartitionManifest:
    """Writes the MLIR of the wanted partitions from the cache, then graph, plan and manifest."""
    numbers = [
        n for n, p in enumerate(plan.partitions) if set(share.owners[p.name]) & set(share.ranks)
    ]
    wanted = tuple(plan.partitions[n] for n in numbers)
    compiled = _compiled_before(directory, config_digest)
    objects: list[ObjectEntry] = []
    for key in plan.objects(wanted):
        source = read_source(cache.source_folder(key))
        source.write(directory.mlir / source.name, directory.write)
        entry = _object_entry(key, source)
        old = compiled.get(key)
        objects.append(old if old is not None and old.mlir == entry.mlir else entry)
    folders = {entry.key: entry.name for entry in objects}

    entries = []
    for number, partition in zip(numbers, wanted, strict=True):
        template = plan.templates[partition.template]
        folder = folders[template.objects[0]]
        files, hashes = {}, {}
        for phase in PHASES:
            files[phase] = f"{subgraph_name(number, phase)}.mlir"
            text = emit_subgraph(plan, number, phase, f"{folder}/{folder}.mlir").encode()
            directory.write(directory.mlir / files[phase], text)
            hashes[phase] = hashlib.sha256(text).hexdigest()
        owners = share.owners[partition.name]
        entries.append(
            Entry(
                number,
                partition.name,
                partition.unit,
                owners,
                partition.template,
                folder,
                partition.inputs,
                partition.outputs,
                files,
                hashes,
            )
        )
    combined: dict[str, str | None] = dict.fromkeys(PHASES)
    combined_hashes = {}
    if full_mlir:
        for phase in PHASES:
            combined[phase] = file = f"{forward_name(phase)}.mlir"
            text = emit_forward(plan, numbers, phase).encode()
            directory.write(directory.mlir / file, text)
            combined_hashes[phase] = hashlib.sha256(text).hexdigest()

    manifest = PartitionManifest(
        config=config_digest,
        made_with=plan.made_with,
        variant=plan.variant,
        strategy=plan.strategy,
        sharing=plan.sharing,
        world=len(share.ranges),
        ranks=share.ranks,
        split=share.split,
        counts={
            "layers": plan.layers,
            **{phase: len(entries) for phase in PHASES},
            "templates": len({entry.template for entry in entries}),
            "objects": len(objects),
        },
        phases=combined,
        phase_hashes=combined_hashes,
        shared_by_phases=_SHARED,
        partitions=tuple(entries),
        objects=tuple(objects),
    )
    directory.write(directory.graph, cache.graph_path(plan.key).read_bytes())
    directory.write(directory.plan, plan.to_json().encode())
    directory.write(directory.manifest, manifest.to_json().encode())
    return manifest


def _compiled_before(directory: BuildDirectory, config_digest: str) -> dict[str, ObjectEntry]:
    """The compiled objects of an import that is replaced, by key: they serve on where code and
    configuration are the same."""
    try:
        manifest = directory.read_manifest()
    except UserError:
        return {}
    if manifest.config != config_digest:
        return {}
    return {entry.key: entry for entry in manifest.objects if entry.file is not None}


def current_keys(
    directory: BuildDirectory, manifest: PartitionManifest, target: Target, cache: Cache
) -> dict[str, str]:
    """The object keys that the MLIR files here have now, by the keys they were imported with.

    The two differ for MLIR that was edited, which is then compiled as it is. Sources that the cache
    lacks are written to it. UserError if a file is missing, or was edited that is not compiled.
    """
    _check_entry_files(directory, manifest)
    keys = {}
    for entry in manifest.objects:
        source = directory.read_source(entry.name)
        unchanged = _hashes(source) == entry.mlir
        key = keys[entry.key] = entry.key if unchanged else source.key(target, manifest.made_with)
        if not is_whole(cache.source_folder(key)):
            source.write(cache.source_folder(key), cache.write)
    return keys


def _check_entry_files(directory: BuildDirectory, manifest: PartitionManifest) -> None:
    """Raises UserError if an entry was edited: it only says where code is, so that would do
    nothing."""
    written = {file: manifest.phase_hashes[p] for p, file in manifest.phases.items() if file}
    for entry in manifest.partitions:
        written |= {file: entry.hashes[phase] for phase, file in entry.files.items()}
    for file, digest in written.items():
        path = directory.mlir / file
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise UserError(
                f"{path} was edited, but it is only the entry to code that lies in the folders"
                " beside it: edit that, and run 'buddy-pipeline import' again to restore this file"
            )


def write_objects(
    directory: BuildDirectory,
    manifest: PartitionManifest,
    plan: Plan,
    keys: Mapping[str, str],
    cache: Cache,
) -> PartitionManifest:
    """Copies compiled objects from the cache, then writes plan and manifest with their keys.

    `plan` is what the directory has.
    """
    objects = []
    for entry in manifest.objects:
        data = cache.read_object(keys[entry.key])
        if data is None:
            raise UserError(f"{cache.object_path(keys[entry.key])} was removed: compile again")
        file = f"{entry.name}.o"
        directory.write(directory.objects / file, data)
        digest = hashlib.sha256(data).hexdigest()
        hashes = _hashes(directory.read_source(entry.name))
        objects.append(
            replace(
                entry,
                key=keys[entry.key],
                mlir=hashes,
                file=file,
                sha256=digest,
                bytes=len(data),
            )
        )
    compiled = replace(manifest, objects=tuple(objects))
    if any(key != imported for imported, key in keys.items()):
        directory.write(directory.plan, _with_keys(plan, keys).to_json().encode())
    directory.write(directory.manifest, compiled.to_json().encode())
    return compiled


def _with_keys(plan: Plan, keys: Mapping[str, str]) -> Plan:
    """The plan with other objects in place of those whose MLIR was edited."""
    templates = {
        name: replace(template, objects=tuple(keys.get(k, k) for k in template.objects))
        for name, template in plan.templates.items()
    }
    return replace(plan, templates=templates, driver=keys.get(plan.driver, plan.driver))


def read_objects(
    directory: BuildDirectory, manifest: PartitionManifest, keys: Sequence[str]
) -> dict[str, bytes]:
    """The object files of these keys; UserError if one is not compiled, missing or altered, or if
    its MLIR was edited since."""
    entries = {entry.key: entry for entry in manifest.objects}
    found = {}
    for key in keys:
        entry = entries.get(key)
        if entry is None:
            raise UserError(
                f"build directory '{directory.root}' was imported for ranks"
                f" {', '.join(map(str, manifest.ranks))} of {manifest.world} only:"
                " import it for this rank too"
            )
        if entry.file is None:
            raise UserError(
                f"build directory '{directory.root}' is not compiled yet:"
                " run 'buddy-pipeline compile --config' on it"
            )
        path = directory.objects / entry.file
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise UserError(f"{path} is missing or was altered: compile the build directory again")
        for name, digest in entry.mlir.items():
            mlir = directory.mlir / name
            if mlir.is_file() and hashlib.sha256(mlir.read_bytes()).hexdigest() != digest:
                raise UserError(
                    f"{mlir} was edited after it was compiled:"
                    " run 'buddy-pipeline compile --config' on the build directory"
                )
        found[key] = data
    return found


def _object_entry(key: str, source: Source) -> ObjectEntry:
    return ObjectEntry(source.name, key, source.symbols, _hashes(source))


def _hashes(source: Source) -> dict[str, str]:
    """SHA-256 of a source's files, by their place below mlir/."""
    return {f"{source.name}/{name}": digest for name, digest in source.hashes().items()}
