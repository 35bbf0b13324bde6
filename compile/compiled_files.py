"""What the compile stage leaves in a build directory: objects, and what names them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.manifest import Plan
from buddy_pipeline.compile.partition_manifest import ObjectEntry, PartitionManifest, source_hashes
from buddy_pipeline.compile.source import is_whole
from buddy_pipeline.compile.target import Target
from buddy_pipeline.partition.errors import UserError


def check_entry_files(directory: BuildDirectory, manifest: PartitionManifest) -> None:
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


def current_key(
    directory: BuildDirectory,
    entry: ObjectEntry,
    made_with: Mapping[str, str],
    target: Target,
    cache: Cache,
) -> str:
    """The key that an object has with the MLIR files here, whose source is then in the cache.

    It is not the entry's for MLIR that was edited, which is then compiled as it is. UserError if a
    file is missing.
    """
    source = directory.read_source(entry.name)
    unchanged = source_hashes(source) == entry.mlir
    key = entry.key if unchanged else source.key(target, made_with)
    if not is_whole(cache.source_folder(key)):
        source.write(cache.source_folder(key), cache.write)
    return key


def write_object(
    directory: BuildDirectory, entry: ObjectEntry, key: str, cache: Cache
) -> ObjectEntry:
    """Copies an object that was compiled from the cache; its entry, now with its file."""
    data = cache.read_object(key)
    if data is None:
        raise UserError(f"{cache.object_path(key)} was removed: compile again")
    file = f"{entry.name}.o"
    directory.write(directory.objects / file, data)
    return replace(
        entry,
        key=key,
        mlir=source_hashes(directory.read_source(entry.name)),
        file=file,
        sha256=hashlib.sha256(data).hexdigest(),
        bytes=len(data),
    )


def write_compiled(
    directory: BuildDirectory,
    manifest: PartitionManifest,
    plan: Plan,
    compiled: Mapping[str, ObjectEntry],
) -> PartitionManifest:
    """Writes plan and manifest when all objects are there: `compiled` has the new entries, by name.

    `manifest` and `plan` are what the directory has.
    """
    keys = {entry.key: compiled[entry.name].key for entry in manifest.objects}
    if any(key != imported for imported, key in keys.items()):
        directory.write(directory.plan, _with_keys(plan, keys).to_json().encode())
    entries = tuple(compiled[entry.name] for entry in manifest.objects)
    written = replace(manifest, objects=entries)
    directory.write(directory.manifest, written.to_json().encode())
    return written


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
