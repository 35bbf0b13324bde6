"""`verify --build-dir`: a directory's graph, manifest, plan, files and numbers."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.host_features import host_features
from buddy_pipeline.ranks.weight_manifest import (
    MANIFEST,
    read_weights_manifest,
    write_weights_manifest,
)
from tests.launcher.project import Project, error


def verified(project: Project, capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """The report of a directory, whose "ok" is what the exit code says."""
    capsys.readouterr()
    where = ("--build-dir", project.build, "--cache-dir", project.cache)
    code = project.run("verify", *where, *arguments)
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ok"] else 1)
    return report


def test_a_compiled_directory_is_verified_from_its_files(
    compiled: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    report = verified(compiled, capsys)
    assert report["ok"] and report["structure"]["world"] == 2
    manifest = BuildDirectory(compiled.build).read_manifest()
    files = report["files"]
    assert files["partitions"] == len(manifest.partitions)
    assert files["objects"] == len(manifest.objects)
    assert files["mlir_files"] == len(list(BuildDirectory(compiled.build).mlir.rglob("*.mlir")))
    assert report["weights"]["files"] == len(
        list(BuildDirectory(compiled.build).weights.glob("*.bin"))
    )


def test_an_import_that_is_not_compiled_is_verified_too(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.gen_config()
    assert project.import_model("--rank", 1, "--world", 2, "--skip-weights") == 0
    report = verified(project, capsys)
    assert report["ok"] and report["files"]["objects"] == 0
    assert report["weights"] == {"ok": True, "files": 0, "faults": []}


@pytest.mark.parametrize(
    "damage", ["edited MLIR", "altered object", "missing entry", "cut index", "symbols"]
)
def test_files_that_are_not_as_they_were_written_are_named(
    damage: str, copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = BuildDirectory(copied.build)
    path = {
        "edited MLIR": directory.mlir / "bp_run_stage" / "bp_run_stage.mlir",
        "altered object": directory.objects / "bp_run_stage.o",
        "missing entry": directory.mlir / "subgraph0_decode1.mlir",
        "cut index": directory.mlir / "bp_run_stage" / "index.json",
        "symbols": directory.objects / "bp_run_stage.o",
    }[damage]
    words = "was changed since it was written"
    if damage == "cut index":
        path.write_bytes(path.read_bytes()[:-9])
        words = "is cut short or no JSON"
    elif damage == "missing entry":
        path.unlink()
        words = "cannot be read (No such file or directory)"
    elif damage == "symbols":
        manifest = directory.read_manifest()
        objects = [replace(e, symbols=("bp_walk_stage",)) for e in manifest.objects]
        named = {"bp_run_stage": objects[[e.name for e in objects].index("bp_run_stage")]}
        changed = tuple(named.get(e.name, e) for e in manifest.objects)
        directory.manifest.write_text(replace(manifest, objects=changed).to_json())
        words = "does not export bp_walk_stage"
    else:
        path.write_bytes(path.read_bytes() + b"\n")
    report = verified(copied, capsys)
    assert report["structure"]["ok"] and not report["ok"]
    mend = f"run 'buddy-pipeline {'compile' if path.suffix == '.o' else 'import'}' again"
    if damage == "edited MLIR":
        mend += " to restore it, or 'buddy-pipeline compile' to take it as it is"
    assert report["files"]["faults"] == [f"{path} {words}: {mend}"]


@pytest.mark.parametrize("part", ["plan", "manifest"])
def test_partitions_that_are_not_the_graphs_are_named(
    part: str, copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = BuildDirectory(copied.build)
    plan, manifest = directory.read_plan(), directory.read_manifest()
    if part == "plan":
        layer = replace(plan.partitions[2], inputs=plan.partitions[2].inputs[:-1])
        partitions = (*plan.partitions[:2], layer, *plan.partitions[3:])
        directory.plan.write_text(replace(plan, partitions=partitions).to_json())
        words = ["partition 2 of the plan is", f"partition {layer.name} of the manifest is not as"]
    else:
        left = tuple(entry for entry in manifest.partitions if entry.name != "layer1")
        directory.manifest.write_text(replace(manifest, partitions=left).to_json())
        words = ["partition layer1 is not in the manifest"]
    report = verified(copied, capsys)
    assert not report["ok"]
    for word, fault in zip(words, report["files"]["faults"], strict=True):
        assert fault.startswith(word)


def write_unseen(path: Path, data: bytes) -> None:
    """Writes a file so that its time of change stays what it was, as when bytes rot on a disk."""
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("damage", ["flipped byte", "truncated", "missing", "manifest"])
def test_damaged_weights_are_named_with_what_mends_them(
    damage: str, copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = BuildDirectory(copied.build).weights
    path, again = folder / "layer1.bin", ("run 'buddy-pipeline import' again", ())
    data = path.read_bytes()
    if damage == "flipped byte":
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        write_unseen(path, flipped)
        words = "was changed since it was written"
        again = ("run 'buddy-pipeline import --no-reuse-weights' again", ("--no-reuse-weights",))
    elif damage == "truncated":
        write_unseen(path, data[:-64])
        words = f"has {len(data) - 64:,} bytes, but {len(data):,} were written"
    elif damage == "missing":
        path.unlink()
        words = "cannot be read (No such file or directory)"
    else:
        path = folder / MANIFEST
        path.write_text(path.read_text().replace("mtime_ns", "time", 1))
        words = "is missing, of another version, or was changed after it was written"
    where = ("verify", "--build-dir", copied.build, "--cache-dir", copied.cache)
    capsys.readouterr()
    code = copied.run(*where)
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    mend, options = again
    assert code == 1 and report["files"]["ok"] and not report["ok"]
    assert report["weights"]["faults"] == [f"{path} {words}: {mend}"]
    assert printed.err.splitlines() == [f"every node once, in order; {path} {words}: {mend}"]
    assert copied.import_model("--world", 2, *options) == 0
    assert copied.compile("-j", 1) == 0
    assert verified(copied, capsys)["ok"]
    assert (folder / "layer1.bin").read_bytes() == data


def test_the_numbers_are_those_of_the_directorys_code_and_weights(
    copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    numeric = ("--numeric", "--prompt", "Hi there")
    report = verified(copied, capsys, *numeric)
    assert report["ok"] and report["numeric"]["ok"]
    folder = BuildDirectory(copied.build).weights
    file = folder / "layer1.bin"
    data = bytearray(file.read_bytes())
    data[4096:8192] = bytes(4096)
    write_unseen(file, data)
    assert "numeric" not in verified(copied, capsys, *numeric)  # they are known to be wrong
    manifest = read_weights_manifest(folder)
    assert manifest is not None
    manifest["files"][file.name]["sha256"] = hashlib.sha256(data).hexdigest()
    write_weights_manifest(folder, manifest["source"], manifest["files"])
    report = verified(copied, capsys, *numeric)
    assert report["weights"]["ok"] and not report["numeric"]["ok"] and not report["ok"]
    (prompt,) = report["numeric"]["prompts"]
    assert not prompt["whole_graph"]["prefill"]["identical"]


@pytest.mark.skipif(not host_features().get("avx2"), reason="no AVX2")
def test_code_for_another_cpu_is_compared_with_a_whole_graph_for_it(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which adds in that CPU's order, not in this one's."""
    assert project.gen_config("--target-cpu", "x86-64-v3", "--variant", "bf16") == 0
    assert project.import_model() == 0 and project.compile("-j", 2) == 0
    report = verified(project, capsys, "--numeric", "--prompt", "Hi there")
    assert report["numeric"]["prompts"][0]["whole_graph"]["prefill"]["identical"]
    assert report["ok"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world", 2], "--world 2 cannot change"),
        (["--strategy", "fine"], "--strategy fine cannot change"),
        (["--exact"], "--exact cannot change"),
        (["--spec", "s"], "needs --spec or --build-dir"),
    ],
)
def test_what_a_directory_has_decided_cannot_be_given(
    arguments: list[object],
    words: str,
    compiled: Project,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = compiled.run("verify", "--build-dir", compiled.build, *arguments)
    assert words in error(capsys, code)


def test_a_damaged_graph_is_one_line(copied: Project, capsys: pytest.CaptureFixture[str]) -> None:
    graph = BuildDirectory(copied.build).graph
    graph.write_text(graph.read_text().replace("layers.1", "layers.2", 1))
    code = copied.run("verify", "--build-dir", copied.build)
    message = error(capsys, code)
    assert f"{graph} was changed after it was written: run 'buddy-pipeline import'" in message
