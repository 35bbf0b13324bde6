"""The `pack` command: bundles from a build directory."""

from pathlib import Path

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.launcher.build_config import load_imported_config
from buddy_pipeline.launcher.bundle import bundle_name, write_bundle
from buddy_pipeline.partition.errors import UserError


def pack_command(build_dir: Path, output: Path, rank: int | None, weights: bool) -> int:
    """Writes the bundle of one rank, or of all that were imported, into a folder."""
    directory = BuildDirectory(build_dir)
    manifest = directory.read_manifest()
    if rank is not None and rank not in manifest.ranks:
        raise UserError(
            f"--rank {rank} was not imported into '{directory.root}', which has"
            f" {', '.join(map(str, manifest.ranks))} of {manifest.world}"
        )
    config = load_imported_config(directory)
    for each in manifest.ranks if rank is None else (rank,):
        path = output / bundle_name(each, manifest.world)
        write_bundle(path, directory, config, each, weights)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, for {config.target.cpu}")
    return 0
