"""Objects and plans that are missing are made in worker processes; whatever happens to these is one
message."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from buddy_pipeline.compile import service, worker_process
from buddy_pipeline.compile.cache import Cache, write_atomically
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.object_builder import Built, ObjectBuilder
from buddy_pipeline.compile.service import (
    PlanTimes,
    build_ahead,
    ensure_objects,
    ensure_plan,
    missing_objects,
)
from buddy_pipeline.compile.source import Source
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.compile.variant import VARIANTS
from buddy_pipeline.compile.worker_process import CompileError
from buddy_pipeline.partition.errors import UserError
from tests.checkpoints import tiny_config
from tests.compile.elf import read_elf


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "cache")


def put_source(cache: Cache, name: str, body: str = "return") -> str:
    """Leaves a source as planning does; returns its key."""
    t = Text()
    with t.function(f"bp_{name}", []):
        t.line(body)
    source = Source(name, (f"bp_{name}",), str(t))
    source.write(cache.source_folder(f"key-{name}"), write_atomically)
    return f"key-{name}"


@pytest.mark.parametrize("jobs", [1, 3])
def test_what_is_missing_is_built_and_then_found(cache: Cache, jobs: int) -> None:
    keys = [put_source(cache, f"fragment{i}") for i in range(4)]
    seen: list[Built] = []
    built = ensure_objects([*keys, keys[0]], host_target(), cache, jobs, seen.append)
    assert sorted({b.key for b in built if not b.from_cache}) == keys
    assert sorted(b.name for b in seen if not b.from_cache) == [f"fragment{i}" for i in range(4)]
    assert missing_objects(keys, cache) == []
    for key in keys:
        data = cache.read_object(key)
        assert data is not None and read_elf(data).visible == {f"bp_{key.removeprefix('key-')}"}
    again = ensure_objects(keys, host_target(), cache, jobs)
    assert [b.from_cache for b in again] == [True] * 4


def test_a_damaged_object_is_built_again(cache: Cache) -> None:
    key = put_source(cache, "fragment")
    ensure_objects([key], host_target(), cache, 1)
    whole = cache.object_path(key).read_bytes()
    for damaged in (whole[:-7], b"\x7fELF", whole[:60] + b"\0" + whole[61:]):
        cache.object_path(key).write_bytes(damaged)
        (built,) = ensure_objects([key], host_target(), cache, 1)
        assert not built.from_cache
        assert cache.object_path(key).read_bytes() == whole


def test_nothing_missing_starts_no_worker(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_object("key", b"object")
    monkeypatch.setattr(worker_process, "installed", lambda package: None)
    (built,) = ensure_objects(["key"], host_target(), cache, 1)
    assert built.from_cache


_FILL = """
import sys
from pathlib import Path
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.service import ensure_objects
from buddy_pipeline.compile.target import host_target
built = ensure_objects(sys.argv[2:], host_target(), Cache.open(Path(sys.argv[1])), 1)
print(*(b.key for b in built if not b.from_cache))
"""


def test_two_processes_build_each_object_once(cache: Cache) -> None:
    keys = [put_source(cache, f"fragment{i}") for i in range(3)]
    command = [sys.executable, "-c", _FILL, str(cache.root), *keys]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    made = [process.communicate()[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(made[0] + made[1]) == keys


def test_mlir_that_does_not_compile_names_fragment_and_source(cache: Cache) -> None:
    key = put_source(cache, "broken", body="%x = what.is_this : i64")
    with pytest.raises(CompileError) as error:
        ensure_objects([key], host_target(), cache, 1)
    message = str(error.value)
    assert "'broken'" in message and str(cache.source_folder(key)) in message
    assert "\n" not in message
    assert cache.read_object(key) is None


def test_after_an_error_nothing_more_is_begun(cache: Cache) -> None:
    # The longest is built first.
    keys = [put_source(cache, "broken", body="%x = what.is_this : i64")]
    keys += [put_source(cache, f"f{i}") for i in range(4)]
    with pytest.raises(CompileError, match="broken"):
        ensure_objects(keys, host_target(), cache, 1)
    assert len(missing_objects(keys, cache)) >= 4
    with cache.lock(keys[0], wait=False) as free:
        assert free


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Has workers run a shell script instead of the interpreter."""
    path = folder / "worker"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_worker_that_dies_names_fragment_source_and_last_words(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = put_source(cache, "fragment")
    stand_in(
        monkeypatch, tmp_path, "read request; echo 'LLVM ERROR: out of luck' >&2; kill -ABRT $$"
    )
    with pytest.raises(CompileError) as error:
        ensure_objects([key], host_target(), cache, 1)
    message = str(error.value)
    assert "'fragment'" in message and str(cache.source_folder(key)) in message
    assert "status -6" in message and message.endswith("LLVM ERROR: out of luck")


def test_a_worker_that_dies_before_it_is_asked_is_the_same_error(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path, "exit 3")
    with pytest.raises(CompileError, match=r"status 3.*'fragment'.*no output"):
        ensure_objects([put_source(cache, "fragment")], host_target(), cache, 1)


def test_a_worker_that_never_answers_is_given_up(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path, "read request; exec sleep 60")
    monkeypatch.setattr(worker_process, "TIME_LIMIT", 0.1)
    with pytest.raises(CompileError, match=r"'fragment'.*took more than"):
        ensure_objects([put_source(cache, "fragment")], host_target(), cache, 1)


@pytest.mark.parametrize("absent", ["torch", "torch-mlir", "xtc-mlir-python-bindings"])
def test_without_a_compiler_the_package_to_install_is_named(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setattr(
        worker_process, "installed", lambda package: None if package == absent else "1"
    )
    with pytest.raises(UserError, match=rf"{absent} is not installed.*buddy-pipeline\[compile\]"):
        ensure_objects([put_source(cache, "fragment")], host_target(), cache, 1)
    with pytest.raises(UserError, match=absent):
        ensure_plan({"model_type": "llama"}, VARIANTS["f32"], host_target(), cache)


def test_a_plan_is_made_once_and_not_used_when_it_is_damaged(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, target = tiny_config("llama"), host_target()
    plan, times = ensure_plan(config, VARIANTS["f32"], target, cache)
    assert times.total > times.export > 0
    keys = plan.objects(plan.partitions)
    assert missing_objects(keys, cache) == keys
    assert ensure_plan(config, VARIANTS["f32"], target, cache) == (plan, PlanTimes())

    path = cache.plan_path(plan.key)
    text = path.read_text()
    for damaged in (text[: len(text) // 2], "{}", text.replace(plan.driver, "0" * 32)):
        path.write_text(damaged)
        assert service._read_plan(cache, plan.key, False) is None
    monkeypatch.setattr(service, "still_current", lambda made_with: False)
    path.write_text(text)
    assert service._read_plan(cache, plan.key, False) is None


@pytest.mark.parametrize("units", [{"prelude", "1"}, set()])
def test_objects_are_built_while_the_model_is_planned(cache: Cache, units: set[str]) -> None:
    target = host_target()
    with ObjectBuilder(target, cache, 2) as builder:
        ahead = build_ahead(builder, units.__contains__)
        plan, _ = ensure_plan(tiny_config("llama"), VARIANTS["f32"], target, cache, ahead=ahead)
        wanted = plan.objects(tuple(p for p in plan.partitions if p.unit in units))
        assert builder.begun >= set(wanted)
        names = {
            key: (cache.source_folder(key) / "index.json").read_text() for key in builder.begun
        }
        assert all(key in wanted or "bp_linear_f32" in names[key] for key in builder.begun)
        built = builder.finish(wanted)
    assert [b.from_cache for b in built] == [False] * len(wanted)
    assert missing_objects(wanted, cache) == []


def test_leaving_a_builder_ends_what_it_is_at(cache: Cache) -> None:
    keys = [put_source(cache, f"fragment{i}") for i in range(5)]
    with ObjectBuilder(host_target(), cache, 1) as builder:
        for key in keys:
            builder.begin(key)
    assert len(missing_objects(keys, cache)) >= 4


def test_damaged_mlir_and_graphs_are_made_again(cache: Cache) -> None:
    config, target = tiny_config("llama"), host_target()
    plan, _ = ensure_plan(config, VARIANTS["f32"], target, cache)
    with_object, without = plan.objects(plan.partitions)[:2]
    cache.write_object(with_object, b"object")

    def made_again(damaged: Path, with_mlir: bool) -> bool:
        """Whether a file that is changed by one byte is written anew, and as it was."""
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:60] + b"?" + whole[61:])
        _, times = ensure_plan(config, VARIANTS["f32"], target, cache, with_mlir=with_mlir)
        again = times.total > 0
        assert (damaged.read_bytes() == whole) == again
        damaged.write_bytes(whole)
        return again

    module = next(cache.source_folder(without).glob("*.mlir"))
    assert made_again(module, with_mlir=False)
    module = next(cache.source_folder(with_object).glob("*.mlir"))
    assert not made_again(module, with_mlir=False)
    assert made_again(module, with_mlir=True)
    assert not made_again(cache.graph_path(plan.key), with_mlir=False)
    assert made_again(cache.graph_path(plan.key), with_mlir=True)


def test_what_a_worker_calls_the_users_error_is_one(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"ok": False, "user_error": "model type 'x' is not known", "seconds": 1.0}
    (tmp_path / "answer").write_text(json.dumps(answer) + "\n")
    stand_in(monkeypatch, tmp_path, f"read request; cat {tmp_path / 'answer'}")
    with pytest.raises(UserError, match=r"^model type 'x' is not known$"):
        ensure_plan({"model_type": "x"}, VARIANTS["f32"], host_target(), cache)
