"""Bundles of a tiny model: what they hold, and which are refused."""

import errno
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.launcher.bundle import Bundle
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.mapped_weights import map_weights
from tests.launcher.project import Project, error


def test_bundles_hold_what_their_rank_needs(compiled: Project, tmp_path: Path) -> None:
    assert compiled.run("pack", "--build-dir", compiled.build, "-o", tmp_path) == 0
    for rank, layer in ((0, "layer2"), (1, "layer0")):
        path = tmp_path / f"rank{rank}-of-2.zip"
        names = zipfile.ZipFile(path).namelist()
        assert f"weights/{layer}.bin" in names and "tokenizer/tokenizer.json" in names
        bundle = Bundle(path)
        assert (bundle.rank, bundle.world, bundle.split) == (rank, 2, (1, 2))
        partitions = [p for p in bundle.plan.partitions if p.name == layer]
        weights = bundle.weights([q for p in partitions for q in p.parameters])
        assert weights is not None
        mapped = map_weights(BuildDirectory(compiled.build).weights, list(weights))
        assert mapped is not None
        for parameter, packed in weights.items():
            assert np.array_equal(packed, mapped[parameter])
            assert packed.ctypes.data % 64 == 0


def test_a_bundle_without_weights_is_small(compiled: Project, tmp_path: Path) -> None:
    assert compiled.run("pack", "--build-dir", compiled.build, "-o", tmp_path, "--no-weights") == 0
    names = zipfile.ZipFile(tmp_path / "rank0-of-2.zip").namelist()
    assert not [name for name in names if name.startswith(("weights", "tokenizer"))]


def test_inspect_shows_a_bundle(
    compiled: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compiled.run("pack", "--build-dir", compiled.build, "-o", tmp_path, "--no-weights") == 0
    capsys.readouterr()
    assert compiled.run("inspect", tmp_path / "rank1-of-2.zip") == 0
    shown = capsys.readouterr().out
    assert "rank: 1 of 2" in shown and host_target().cpu in shown and "plan.json" in shown


def test_a_damaged_bundle_is_named(compiled: Project, tmp_path: Path) -> None:
    compiled.run("pack", "--build-dir", compiled.build, "-o", tmp_path, "--rank", 0)
    whole = (tmp_path / "rank0-of-2.zip").read_bytes()
    bad = tmp_path / "bad.zip"
    for data in (b"", b"text", whole[:-100], whole[: len(whole) // 2]):
        bad.write_bytes(data)
        with pytest.raises(UserError, match=r"bad\.zip is cut short or no bundle"):
            Bundle(bad)
    with pytest.raises(UserError, match="does not exist"):
        Bundle(tmp_path / "none.zip")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 99}, "is of another format version"),
        ({"world": 4}, "was changed after it was written"),
    ],
)
def test_a_bundle_of_another_version_or_edited_is_named(
    change: dict[str, int], words: str, compiled: Project, tmp_path: Path
) -> None:
    compiled.run("pack", "--build-dir", compiled.build, "-o", tmp_path, "--rank", 0)
    path, changed = tmp_path / "rank0-of-2.zip", tmp_path / "changed.zip"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(changed, "w") as archive:
        for name in source.namelist():
            data = source.read(name)
            if name == "bundle.json":
                data = json.dumps({**json.loads(data), **change}).encode()
            archive.writestr(name, data)
    with pytest.raises(UserError, match=rf"changed\.zip: .*{words}: run 'buddy-pipeline pack'"):
        Bundle(changed)


def test_a_bundle_for_another_cpu_is_refused_with_both_named(
    project: Project, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    project.gen_config("--target-cpu", "aarch64")
    assert project.import_model() == 0 and project.compile() == 0
    assert project.run("pack", "--build-dir", project.build, "-o", tmp_path) == 0
    capsys.readouterr()
    bundle = ("--bundle", tmp_path, "--prompt", "Hi", "--cache-dir", project.cache)
    with pytest.raises(SystemExit) as ended:  # a session ends its process
        project.run("run", *bundle)
    message = error(capsys, int(ended.value.code or 0))
    assert "aarch64-unknown-linux-gnu" in message and host_target().cpu in message


def _pack(compiled: Project, folder: Path) -> Path:
    compiled.run("pack", "--build-dir", compiled.build, "-o", folder, "--rank", 0)
    return folder / "rank0-of-2.zip"


def _weights_place(bundle: Path, name: str) -> tuple[int, int]:
    """Where a weight file's bytes begin in a bundle, and how many there are."""
    with zipfile.ZipFile(bundle) as archive:
        entry = archive.getinfo(name)
        data = archive.read(name)
    start = bundle.read_bytes().index(data, entry.header_offset)
    return start, len(data)


@pytest.mark.parametrize("where", ["first", "last"])
def test_changed_weights_are_noticed_at_the_start(
    where: str, compiled: Project, tmp_path: Path
) -> None:
    path = _pack(compiled, tmp_path)
    start, size = _weights_place(path, "weights/layer2.bin")
    data = bytearray(path.read_bytes())
    data[start if where == "first" else start + size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"weights/layer2\.bin is not as it was packed \(its bytes"):
        Bundle(path)


@pytest.mark.parametrize("kind", ["changed", "gone"])
def test_a_tokenizer_that_is_not_the_packed_one_is_named(
    kind: str, compiled: Project, tmp_path: Path
) -> None:
    path, changed = _pack(compiled, tmp_path), tmp_path / "changed.zip"
    name = "tokenizer/tokenizer.json"
    if kind == "gone":
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(changed, "w") as archive:
            for each in set(source.namelist()) - {name}:
                archive.writestr(each, source.read(each))
    else:
        start, size = _weights_place(path, name)
        data = bytearray(path.read_bytes())
        data[start + size // 2] ^= 1
        changed.write_bytes(data)
    bundle = Bundle(changed)
    words = rf"changed\.zip is cut short or no bundle \(.*{name}.*\): copy or pack it again"
    for read in (lambda: bundle.checkpoint(Cache.open(tmp_path / "cache")), bundle.verify):
        with pytest.raises(UserError, match=words):
            read()


def test_a_cache_that_takes_no_tokenizer_is_named_unless_it_has_it(
    compiled: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    bundle, cache = Bundle(_pack(compiled, tmp_path)), Cache.open(tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr("buddy_pipeline.compile.cache.write_atomically", full)
        with pytest.raises(UserError, match=r"cache folder .* cannot be used: No space left"):
            bundle.checkpoint(cache)
    unpacked = bundle.checkpoint(cache)
    monkeypatch.setattr("buddy_pipeline.compile.cache.write_atomically", full)
    again = bundle.checkpoint(cache)
    assert unpacked is not None and again is not None and again.tokenizer == unpacked.tokenizer


@pytest.mark.parametrize("kind", ["cut", "exchanged", "compressed", "gone"])
def test_a_weight_file_that_is_not_the_packed_one_is_named(
    kind: str, compiled: Project, tmp_path: Path
) -> None:
    path, changed = _pack(compiled, tmp_path), tmp_path / "changed.zip"
    name = "weights/layer2.bin"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(changed, "w") as archive:
        for each in source.namelist():
            data, how = source.read(each), zipfile.ZIP_STORED
            if each == name and kind == "cut":
                data = data[:-64]
            elif each == name and kind == "exchanged":
                data = data[64:] + data[:64]
            elif each == name and kind == "compressed":
                how = zipfile.ZIP_DEFLATED
            if each != name or kind != "gone":
                archive.writestr(each, data, how)
    words = {
        "cut": r"layer2\.bin is not as it was packed \(it has [\d,]+ bytes, but [\d,]+ were",
        "exchanged": r"layer2\.bin is not as it was packed \(its bytes were changed\)",
        "compressed": r"layer2\.bin was stored by another program",
        "gone": r"There is no item named 'weights/layer2\.bin'",
    }
    with pytest.raises(UserError, match=words[kind]):
        Bundle(changed)


def test_all_of_a_bundle_is_read_on_demand(
    compiled: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _pack(compiled, tmp_path)
    assert compiled.run("inspect", path, "--verify") == 0
    assert "files are as they were packed" in capsys.readouterr().err
    start, size = _weights_place(path, "weights/layer2.bin")
    assert size > 100_000
    data = bytearray(path.read_bytes())
    data[start + 5000] ^= 1  # between the pages that a start looks at
    path.write_bytes(data)
    Bundle(path)
    message = error(capsys, compiled.run("inspect", path, "--verify"))
    assert f"bundle {path}: weights/layer2.bin is not as it was packed" in message
    assert "--verify reads a bundle" in error(
        capsys, compiled.run("inspect", compiled.build, "--verify")
    )
