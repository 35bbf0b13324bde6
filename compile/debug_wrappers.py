"""Debug wrappers: for each partition a small script that runs it alone on saved inputs."""

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.entry_files import describe_arguments
from buddy_pipeline.compile.manifest import PartitionPlan, Plan
from buddy_pipeline.compile.partition_manifest import PartitionManifest


def write_wrappers(directory: BuildDirectory, plan: Plan, manifest: PartitionManifest) -> None:
    """Writes the wrapper of every partition that was imported, such as "debug/layer3.py"."""
    for entry in manifest.partitions:
        text = emit_wrapper(plan, plan.partitions[entry.number], f"mlir/{entry.source}")
        directory.write(directory.debug / f"{entry.name}.py", text.encode())


def emit_wrapper(plan: Plan, partition: PartitionPlan, source: str) -> str:
    """Python text of a partition's wrapper; `source` is where its code's MLIR is, for the reader.

    It lies one folder below the build directory, and passes its arguments on.
    """
    template = plan.templates[partition.template]
    words = "\n".join(f"    {line}" for line in describe_arguments(plan, partition))
    return f'''"""Runs partition {partition.name} alone, on saved values or random ones.

    python {partition.name}.py --inputs FILE.npz --output OUT.npz
    python {partition.name}.py --random SEED --tokens 5 --output OUT.npz

Its code is @{template.symbol} in {source}.
Words of its args table:
{words}
"""

import sys
from pathlib import Path

from buddy_pipeline.launcher import cli

build_dir = Path(__file__).resolve().parent.parent
sys.exit(cli.main(["run-partition", str(build_dir), "{partition.name}", *sys.argv[1:]]))
'''
