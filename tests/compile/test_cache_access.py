"""A cache folder that this user may read but not write, as a shared one on a cluster."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.partition.errors import UserError

NOBODY = 65534


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder without write permission, and this process without the right to ignore that."""
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    above = [path for path in folder.parents if path != Path("/") and path.owner() == "root"]
    is_root = os.geteuid() == 0
    modes = {path: path.stat().st_mode for path in above}
    if is_root:
        for path in above:
            path.chmod(modes[path] | 0o555)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
            for path, mode in modes.items():
                path.chmod(mode)
        for path in folders:
            path.chmod(0o755)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache.open(tmp_path / "cache")
    cache.write_object("key", b"object")
    return cache


def test_what_is_there_can_be_read(cache: Cache) -> None:
    with read_only(cache.root):
        assert Cache.open(cache.root).read_object("key") == b"object"


def test_nothing_can_be_built_and_the_message_says_what_to_do(cache: Cache) -> None:
    line = rf"cache folder '{cache.root}' cannot be used: Permission denied; .* --cache-dir"
    with read_only(cache.root):
        with pytest.raises(UserError, match=line), cache.lock("other"):
            pass
        with pytest.raises(UserError, match=line):
            cache.write_object("other", b"object")


def test_an_object_that_cannot_be_read_counts_as_missing(cache: Cache) -> None:
    cache.object_path("key").chmod(0)
    with read_only(cache.root):
        assert cache.read_object("key") is None
