"""Packed weights in a build directory: their bytes, and when they are made anew."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.mapped_weights import map_weights
from buddy_pipeline.ranks.packing import pack_parameters
from buddy_pipeline.ranks.weight_files import export_weights
from buddy_pipeline.ranks.weight_manifest import MANIFEST
from tests.launcher.project import Project, error


def test_direct_and_joined_export_write_the_same_bytes(compiled: Project, tmp_path: Path) -> None:
    partitions = BuildDirectory(compiled.build).read_plan().partitions
    source = open_checkpoint(compiled.model)
    for name, direct in (("direct", True), ("joined", False)):
        export_weights(tmp_path / name, partitions, source, "f32", direct=direct)
    files = sorted((tmp_path / "direct").glob("*.bin"))
    assert len(files) == 5
    for file in files:
        assert file.read_bytes() == (tmp_path / "joined" / file.name).read_bytes()


def test_weights_are_reused_until_what_they_were_made_from_changes(
    compiled: Project, tmp_path: Path
) -> None:
    partitions = BuildDirectory(compiled.build).read_plan().partitions
    model = shutil.copytree(compiled.model, tmp_path / "model")

    def export(variant: str = "f32", **how: bool) -> tuple[int, int]:
        done = export_weights(
            tmp_path / "weights", partitions, open_checkpoint(model), variant, **how
        )
        return len(done.written), len(done.reused)

    assert export() == (5, 0)
    assert export() == (0, 5)
    assert export(reuse=False) == (5, 0)
    (tmp_path / "weights" / "layer1.bin").unlink()
    assert export() == (1, 4)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes())  # another time of change
    assert export() == (5, 0)
    manifest = tmp_path / "weights" / MANIFEST
    for edited in ("{", "[]", manifest.read_text().replace('"layer1.bin"', '"layer9.bin"')):
        manifest.write_text(edited)
        assert export() == (5, 0)
    assert export("bf16") == (5, 0)


def test_mapped_weights_are_what_would_be_packed(compiled: Project) -> None:
    plan = BuildDirectory(compiled.build).read_plan()
    parameters = list(dict.fromkeys(p for part in plan.partitions for p in part.parameters))
    folder = BuildDirectory(compiled.build).weights
    mapped = map_weights(folder, parameters, (compiled.model, "f32"))
    assert mapped is not None
    packed = pack_parameters(parameters, open_checkpoint(compiled.model), 1)
    for parameter in parameters:
        assert np.array_equal(mapped[parameter], packed[parameter])
        assert mapped[parameter].ctypes.data % 64 == 0
        assert not mapped[parameter].flags.writeable
    assert map_weights(folder, parameters, (compiled.model, "f16")) is None


def test_weights_of_a_model_that_has_changed_since_are_not_packed(
    copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = copied.folder / "changed"
    shutil.copytree(copied.model, changed)
    copied.model = changed
    assert copied.gen_config() == 0
    assert copied.import_model("--world", 2) == 0
    pack = ("pack", "--build-dir", copied.build, "-o", copied.folder / "bundles")
    assert copied.run(*pack) == 0
    weights = changed / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-400:] = bytes(400)
    weights.write_bytes(data)
    capsys.readouterr()
    message = error(capsys, copied.run(*pack))
    assert str(changed) in message and "import" in message
    assert copied.run(*pack, "--no-weights") == 0
    assert copied.import_model("--world", 2) == 0
    assert copied.run(*pack) == 0
