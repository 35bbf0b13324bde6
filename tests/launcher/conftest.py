"""Fixtures of the build commands: a project, and a compiled build directory."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.project import Project


@pytest.fixture(scope="session")
def build_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def project(tmp_path: Path, build_cache: Path, checkpoint: Callable[..., Path]) -> Project:
    return Project(tmp_path, checkpoint("qwen2"), build_cache)


@pytest.fixture(scope="session")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, build_cache: Path, checkpoint: Callable[..., Path]
) -> Project:
    """A compiled build directory for a world of 2; tests must not change it."""
    made = Project(tmp_path_factory.mktemp("compiled"), checkpoint("qwen2"), build_cache)
    assert made.gen_config() == 0
    assert made.import_model("--world", 2) == 0
    assert made.compile("-j", 1) == 0
    return made


@pytest.fixture
def copied(compiled: Project, tmp_path: Path) -> Project:
    """A copy of it that may be changed."""
    copy = Project(tmp_path, compiled.model, compiled.cache)
    shutil.copytree(compiled.build, copy.build)
    return copy
