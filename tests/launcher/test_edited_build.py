"""A build directory whose files were edited, damaged or removed."""

import json
from pathlib import Path

import pytest

from buddy_pipeline.compile.build_directory import BuildDirectory
from tests.launcher.project import Project, error


def test_edited_mlir_is_compiled_as_it_is(
    copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = BuildDirectory(copied.build)
    before = directory.read_manifest()
    entry = next(e for e in before.objects if e.name.startswith("prelude"))
    file = directory.mlir / entry.name / f"{entry.name}.mlir"
    file.write_text(file.read_text().replace("// 0: Embedding", "// looked up here"))
    capsys.readouterr()
    assert copied.compile() == 0
    assert f"{directory.mlir / entry.name} was edited: compiled as it is" in capsys.readouterr().out
    after = {e.name: e for e in directory.read_manifest().objects}
    assert after[entry.name].key != entry.key
    assert {e.key for e in before.objects} - {e.key for e in after.values()} == {entry.key}
    assert after[entry.name].key in directory.read_plan().objects(directory.read_plan().partitions)


def _edit(file: Path, text: str) -> str:
    """Puts text at the end of a file; returns what is a name for it in messages."""
    file.write_text(file.read_text() + text)
    return str(file)


def test_edited_mlir_is_not_run_or_packed_before_it_is_compiled(
    copied: Project, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = _edit(copied.build / "mlir" / "bp_run_stage" / "bp_run_stage.mlir", "// mine\n")
    pack = ("pack", "--build-dir", copied.build, "-o", tmp_path / "packed")
    message = error(capsys, copied.run(*pack))
    assert message.startswith(f"{file} was edited after it was compiled: ")
    assert copied.compile() == 0 and copied.run(*pack) == 0


def test_edited_mlir_that_does_not_compile_is_the_users_error(
    copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    _edit(copied.build / "mlir" / "bp_run_stage" / "bp_run_stage.mlir", "nonsense\n")
    before = BuildDirectory(copied.build).read_manifest()
    message = error(capsys, copied.compile())
    assert message.startswith(f"{copied.build / 'mlir' / 'bp_run_stage'} was edited and does not")
    assert BuildDirectory(copied.build).read_manifest() == before


@pytest.mark.parametrize("file", ["subgraph0_decode2.mlir", "forward_prefill.mlir"])
def test_an_edited_entry_would_do_nothing_and_is_refused(
    file: str, copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _edit(copied.build / "mlir" / file, "// mine\n")
    message = error(capsys, copied.compile())
    assert message.startswith(f"{path} was edited, but it is only the entry to code")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("plan.json", "plan.json was changed after it was written"),
        ("mlir/bp_run_stage/index.json", "index.json was changed after it was written"),
    ],
)
def test_other_files_edited_by_hand_are_one_line(
    file: str, words: str, copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copied.build / file
    path.write_text(path.read_text().replace("bp_run_stage", "bp_run_stagger", 1))
    if file == "plan.json":
        path.write_text(path.read_text().replace('"layers": 3', '"layers": 4'))
    message = error(capsys, copied.compile())
    assert words in message and "run 'buddy-pipeline import' again" in message


def test_an_mlir_file_that_was_removed_is_named(
    copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied.build / "mlir" / "bp_run_stage" / "bp_run_stage.mlir").unlink()
    message = error(capsys, copied.compile())
    assert "mlir/bp_run_stage has no bp_run_stage.mlir (No such file" in message


@pytest.mark.parametrize("damage", ["missing", "edited", "cut", "other version"])
def test_a_damaged_manifest_is_one_line(
    damage: str, copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    path = BuildDirectory(copied.build).manifest
    text = path.read_text()
    if damage == "missing":
        path.unlink()
    elif damage == "edited":
        path.write_text(text.replace('"variant": "f32"', '"variant": "f16"'))
    elif damage == "cut":
        path.write_text(text[: len(text) // 2])
    else:
        path.write_text(json.dumps({**json.loads(text), "format": 99}))
    objects = sorted(BuildDirectory(copied.build).objects.iterdir())
    message = error(capsys, copied.compile())
    words = {
        "missing": "has no partition_manifest.json",
        "edited": "was changed after it was written",
        "cut": "is cut short or no JSON",
        "other version": "is of another format version",
    }
    assert words[damage] in message
    assert "partition_manifest.json" in message and "buddy-pipeline import" in message
    assert sorted(BuildDirectory(copied.build).objects.iterdir()) == objects
