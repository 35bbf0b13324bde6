"""Imports run one way, and running a model from a filled cache needs no compiler and no MPI."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "buddy_pipeline"

# The part of compile/ that a rank reads: it is what a machine without torch and MLIR has.
READ_BY_RANKS = (
    "compile.manifest",
    "compile.profile_table",
    "compile.cache",
    "compile.loader",
    "compile.host_features",
    "compile.matrix_unit",
    "compile.target",
    "compile.formats",
)

MAY_IMPORT = {
    "partition": ("partition",),
    "compile": ("compile", "partition"),
    "ranks": (
        *("ranks", *READ_BY_RANKS),
        *(f"partition.{name}" for name in ("layers", "errors", "sealed_json", "counted")),
    ),
    "launcher": ("launcher", "ranks", "compile", "partition"),
}

COMPILERS = ("torch", "torch_mlir", "mlir", "transformers")


def imports(source: str, module: str, is_package: bool = False) -> Iterator[str]:
    """Full dotted names of all imports in `source`, wherever in it; `from a import b` is "a.b"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            anchor = module.split(".")
            depth = len(anchor) - node.level + is_package
            base = anchor[:depth] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def modules(folder: str) -> dict[str, Path]:
    """Paths of all modules below a top-level folder, by full name."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join([PACKAGE, *(part for part in parts if part != "__init__")])] = path
    return found


def imports_of_file(module: str, path: Path) -> list[str]:
    return list(imports(path.read_text(), module, path.name == "__init__.py"))


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folder_imports_only_what_lies_below_it(folder: str) -> None:
    allowed = tuple(f"{PACKAGE}.{package}" for package in MAY_IMPORT[folder])
    wrong = [
        f"{module} imports {name}"
        for module, path in modules(folder).items()
        for name in imports_of_file(module, path)
        if is_within(name, (PACKAGE,)) and not is_within(name, allowed)
    ]
    assert modules(folder)
    assert wrong == []


@pytest.mark.parametrize("folder", ["partition", "ranks"])
def test_folder_imports_no_compiler_anywhere(folder: str) -> None:
    """Not even inside a function, where the test below would not see it."""
    wrong = [
        f"{module} imports {name}"
        for module, path in modules(folder).items()
        for name in imports_of_file(module, path)
        if is_within(name, COMPILERS)
    ]
    assert wrong == []


def test_importing_what_a_rank_runs_loads_neither_compiler_nor_mpi() -> None:
    names = [
        *modules("partition"),
        *modules("ranks"),
        *(name for name in modules("compile") if is_within(name, _full(READ_BY_RANKS))),
        *(name for name in modules("launcher") if name == f"{PACKAGE}.launcher.cli"),
    ]
    assert loaded_after_importing(names) & {*COMPILERS, "mpi4py"} == set()


def test_the_tests_see_what_they_look_for() -> None:
    source = (
        "import mpi4py.MPI\n"
        "from buddy_pipeline import compile\n"
        "def late():\n"
        "    from . import stage\n"
        "    from ..launcher.cli import main\n"
    )
    found = ["mpi4py.MPI", "buddy_pipeline.compile"]
    late = ["buddy_pipeline.ranks.stage", "buddy_pipeline.launcher.cli.main"]
    assert sorted(imports(source, "buddy_pipeline.ranks.engine")) == sorted(found + late)
    inside = list(imports("from .linear import emit", "buddy_pipeline.compile", is_package=True))
    assert inside == ["buddy_pipeline.compile.linear.emit"]
    assert not is_within("buddy_pipeline.compile.lowering", _full(READ_BY_RANKS))
    assert not is_within("torchlight", COMPILERS)
    assert "numpy" in loaded_after_importing(["numpy.linalg"])


def loaded_after_importing(names: list[str]) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that imported `names`."""
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def _full(packages: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{PACKAGE}.{package}" for package in packages)
