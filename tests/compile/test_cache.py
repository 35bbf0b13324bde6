"""The cache: whole files or none, damage counts as missing, one builder for each key."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.compile.cache import Cache, default_cache_dir, write_atomically
from buddy_pipeline.partition.errors import UserError


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "cache")


@given(st.binary(min_size=1, max_size=2000))
def test_an_object_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    cache = Cache.open(tmp_path_factory.mktemp("cache"))
    cache.write_object("key", data)
    assert cache.read_object("key") == data
    assert cache.read_object("other") is None


def test_an_object_cut_short_anywhere_is_missing(cache: Cache) -> None:
    cache.write_object("key", bytes(range(100)))
    whole = cache.object_path("key").read_bytes()
    for length in range(len(whole)):
        cache.object_path("key").write_bytes(whole[:length])
        assert cache.read_object("key") is None


def test_an_object_with_any_byte_altered_is_missing(cache: Cache) -> None:
    cache.write_object("key", bytes(range(50)))
    whole = cache.object_path("key").read_bytes()
    for place in range(len(whole)):
        altered = bytearray(whole)
        altered[place] ^= 0x10
        cache.object_path("key").write_bytes(altered)
        assert cache.read_object("key") is None


def test_a_foreign_file_is_missing_and_is_replaced(cache: Cache) -> None:
    cache.object_path("key").write_bytes(b"\x7fELF" + bytes(500))
    assert cache.read_object("key") is None
    cache.write_object("key", b"right")
    assert cache.read_object("key") == b"right"


def test_plans_that_are_not_text_are_missing(cache: Cache) -> None:
    assert cache.read_plan("key") is None
    cache.plan_path("key").write_bytes(b"\xff\xfe\x00")
    assert cache.read_plan("key") is None


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = {bytes([c]) * 200_000 for c in b"abcdef"}
    write_atomically(path, next(iter(contents)))
    done = threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        while not done.is_set():
            seen.append(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for content in [*contents] * 3:
        write_atomically(path, content)
    done.set()
    reader.join()
    assert seen and set(seen) <= contents


def test_a_key_has_one_holder_at_a_time_within_a_process(cache: Cache) -> None:
    with cache.lock("key") as mine:
        assert mine
        with cache.lock("key", wait=False) as second:
            assert not second
        with cache.lock("other", wait=False) as other:
            assert other
    with cache.lock("key", wait=False) as again:
        assert again


_HOLDER = """
import sys
from pathlib import Path
from buddy_pipeline.compile.cache import Cache
with Cache.open(Path(sys.argv[1])).lock("key"):
    print("held", flush=True)
    sys.stdin.readline()
    Cache.open(Path(sys.argv[1])).write_object("key", b"built by the other")
"""


def _hold(root: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    return holder


def test_another_process_waits_and_then_finds_what_was_built(cache: Cache) -> None:
    with _hold(cache.root) as holder:
        with cache.lock("key", wait=False) as mine:
            assert not mine
        release = threading.Timer(0.2, holder.communicate, ["\n"])
        release.start()
        with cache.lock("key") as mine:
            assert mine
            assert cache.read_object("key") == b"built by the other"
        release.join()


def test_the_lock_of_a_process_that_died_is_free(cache: Cache) -> None:
    with _hold(cache.root) as holder:
        holder.kill()
        holder.wait()
        with cache.lock("key") as mine:
            assert mine
        assert cache.read_object("key") is None


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cache folder '.*file' cannot be used: .*--cache-dir"):
        Cache.open(tmp_path / "file")


def test_the_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/buddy-pipeline")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_cache_dir() == Path.home() / ".cache" / "buddy-pipeline"
