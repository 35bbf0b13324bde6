"""Running from a filled cache needs the base install only: no torch, no MLIR, no MPI.

The base install is made here by linking, out of the environment of the tests, just what the
dependencies in pyproject.toml lead to.
"""

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.e2e.command import answer, buddy_pipeline, refusal
from tests.jobs import ROOT
from tests.mpi.job import needs_mpi

# -S: without site-packages, so that PYTHONPATH is all there is.
RUN = (
    sys.executable,
    "-S",
    "-c",
    "import sys; from buddy_pipeline.launcher.entry import main; sys.exit(main())",
)


def needed(requirements: list[str], found: dict[str, importlib.metadata.Distribution]) -> None:
    """Add the distributions that these requirements lead to, extras left out."""
    for text in requirements:
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        name = requirement.name.lower().replace("_", "-")
        if applies and name not in found:
            found[name] = importlib.metadata.distribution(name)
            needed(found[name].requires or [], found)


def base_install(folder: Path) -> dict[str, importlib.metadata.Distribution]:
    """Fill a folder with links to what a base install has; returns its distributions."""
    found: dict[str, importlib.metadata.Distribution] = {}
    needed(importlib.metadata.distribution("buddy-pipeline").requires or [], found)
    for distribution in found.values():
        for file in distribution.files or []:
            # A folder as a whole; a file outside site-packages (../../libiomp5.so) by itself.
            place = file if file.parts[0] == ".." else Path(file.parts[0])
            link = Path(os.path.normpath(folder / place))
            if not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(str(distribution.locate_file(place))).resolve())
    (folder / "buddy_pipeline").symlink_to(ROOT / ".mypy/buddy_pipeline")
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "lib/python/site-packages"
    folder.mkdir(parents=True)
    assert not {"torch", "torch-mlir", "mpi4py", "transformers"} & base_install(folder).keys()
    return folder


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    path = checkpoint("llama")
    (path / "spec.json").write_text(json.dumps({"hf_model_path": str(path)}))
    return path


def ask(model: Path) -> list[object]:
    return ["--spec", model / "spec.json", "--prompt", "Hello", "--max-tokens", 8]


def test_a_filled_cache_needs_no_compilers(
    base: Path, model: Path, cache: Path, tmp_path: Path
) -> None:
    whole = answer(tmp_path / "whole.json", *ask(model), cache=cache)
    paths = {"PYTHONPATH": str(base)}
    given = answer(tmp_path / "base.json", *ask(model), cache=cache, env=paths, command=RUN)
    assert given["token_ids"] == whole["token_ids"]


def test_an_empty_cache_without_compilers_is_one_line(
    base: Path, model: Path, tmp_path: Path
) -> None:
    ended = buddy_pipeline(
        *ask(model), cache=tmp_path / "cache", env={"PYTHONPATH": str(base)}, command=RUN
    )
    line = refusal(ended)
    assert "torch, torch-mlir, xtc-mlir-python-bindings is not installed" in line
    assert "install buddy-pipeline[compile], or give a filled --cache-dir" in line


@needs_mpi
@pytest.mark.mpi
def test_several_ranks_without_mpi4py_are_one_line(base: Path, model: Path, cache: Path) -> None:
    paths = {"PYTHONPATH": str(base)}
    ended = buddy_pipeline(*ask(model), ranks=2, cache=cache, env=paths, command=RUN)
    assert "pip install 'buddy-pipeline[mpi]'" in refusal(ended)
