"""The build commands on a tiny model: what each leaves, what the next takes, what is refused."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.lowering import lower_kernel
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.launcher import cli
from buddy_pipeline.launcher.bundle import Bundle
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks import weight_files
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.weight_files import export_weights, map_weights


class Project:
    """A spec, a model and a cache, and the commands on them."""

    def __init__(self, folder: Path, model: Path, cache: Path) -> None:
        self.folder, self.model, self.cache = folder, model, cache
        self.spec = folder / "spec.json"
        self.spec.write_text('{"max_token_len": 64}')
        self.build = folder / "build"
        self.config = self.build / "config.json"

    def run(self, command: str, *arguments: object) -> int:
        return cli.main([command, *map(str, arguments)])

    def gen_config(self, *arguments: object) -> int:
        model = ("--spec", self.spec, "--local-model", self.model)
        return self.run("gen-config", *model, "-o", self.config, *arguments)

    def import_model(self, *arguments: object) -> int:
        return self.run("import", "--config", self.config, "--cache-dir", self.cache, *arguments)

    def compile(self, *arguments: object) -> int:
        return self.run("compile", "--config", self.config, "--cache-dir", self.cache, *arguments)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def project(tmp_path: Path, cache: Path, checkpoint: Callable[..., Path]) -> Project:
    return Project(tmp_path, checkpoint("qwen2"), cache)


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoint: Callable[..., Path]
) -> Project:
    """A compiled build directory for a world of 2; tests must not change it."""
    made = Project(tmp_path_factory.mktemp("compiled"), checkpoint("qwen2"), cache)
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


def error(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """The one line of a refused command."""
    printed = capsys.readouterr().err
    assert code == 2
    lines = [line for line in printed.splitlines() if line.startswith("buddy-pipeline: error: ")]
    assert len(lines) == 1 and "Traceback" not in printed
    return lines[0].removeprefix("buddy-pipeline: error: ")


def test_the_configuration_has_everything_resolved(project: Project) -> None:
    assert project.gen_config("--strategy", "fine", "--target-cpu", "x86-64-v3") == 0
    config = json.loads(project.config.read_text())
    assert (config["context"], config["layers"], config["strategy"]) == (64, 3, "fine")
    assert config["target"]["cpu"] == "x86-64-v3" and config["target"]["vector_bits"] == 256
    assert config["model"]["model_type"] == "qwen2"
    assert config["shapes"]["hidden_size"] == 60


def test_a_configuration_needs_no_weights(project: Project) -> None:
    bare = project.folder / "bare"
    bare.mkdir()
    shutil.copy(project.model / "config.json", bare)
    project.model = bare
    assert project.gen_config() == 0
    assert project.import_model("--skip-weights") == 0
    assert not BuildDirectory(project.build).weights.exists()


def test_the_manifest_names_every_file_and_owner(compiled: Project) -> None:
    directory = BuildDirectory(compiled.build)
    manifest = directory.read_manifest()
    assert manifest.counts["prefill"] == manifest.counts["decode"] == len(manifest.partitions) == 6
    owners = {entry.name: entry.owner_ranks for entry in manifest.partitions}
    assert owners["positions"] == (0, 1)
    assert owners["prelude"] == owners["layer0"] == owners["layer1"] == (1,)
    assert owners["layer2"] == owners["postlude"] == (0,)
    for entry in manifest.partitions:
        assert entry.files == {
            "prefill": f"subgraph0_prefill{entry.number}.mlir",
            "decode": f"subgraph0_decode{entry.number}.mlir",
        }
        for file in entry.files.values():
            assert (directory.mlir / file).is_file()
        assert (directory.mlir / entry.source / f"{entry.source}.mlir").is_file()
    for phase in ("prefill", "decode"):
        assert (directory.mlir / f"forward_{phase}.mlir").is_file()
    assert "same code" in manifest.shared_by_phases
    layers = {e.template for e in manifest.partitions if e.name.startswith("layer")}
    assert len(layers) == 1


def test_entry_files_are_mlir(compiled: Project) -> None:
    for file in BuildDirectory(compiled.build).mlir.glob("*.mlir"):
        assert f"@{file.stem}" in lower_kernel(file.read_text()), file.name


def test_one_rank_imports_its_own_partitions_only(project: Project) -> None:
    project.gen_config()
    assert project.import_model("--rank", 0, "--world", 2, "--skip-full-mlir") == 0
    manifest = BuildDirectory(project.build).read_manifest()
    assert [e.name for e in manifest.partitions] == ["positions", "layer2", "postlude"]
    assert manifest.phases == {"prefill": None, "decode": None}
    assert not list(BuildDirectory(project.build).mlir.glob("forward_*"))
    assert sorted(f.name for f in BuildDirectory(project.build).weights.glob("*.bin")) == [
        "layer2.bin",
        "postlude.bin",
    ]


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


def test_the_whole_graph_is_one_object(project: Project) -> None:
    project.gen_config("--whole-graph")
    assert project.import_model("--skip-weights") == 0
    manifest = BuildDirectory(project.build).read_manifest()
    assert manifest.sharing == "whole-graph"
    assert {entry.source for entry in manifest.partitions} == {"whole_graph"}


def test_inspect_shows_manifest_object_and_weights(
    compiled: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = BuildDirectory(compiled.build)
    capsys.readouterr()
    assert compiled.run("inspect", compiled.build) == 0
    assert "layer1" in capsys.readouterr().out
    assert compiled.run("inspect", directory.objects / "bp_run_stage.o") == 0
    shown = capsys.readouterr().out
    assert host_target().cpu in shown and "bp_run_stage" in shown and "omp_get_thread_num" in shown
    assert compiled.run("inspect", directory.weights, "--json") == 0
    assert "layer0.bin" in json.loads(capsys.readouterr().out)["files"]
    assert compiled.run("inspect", compiled.model, "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"] == "qwen2"


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


def formats(**changes: str) -> dict[str, object]:
    """A configuration's formats, f32 but for `changes`."""
    uses = dict.fromkeys(("weights", "table_and_head", "rest", "cache"), "f32")
    return {"formats": {"name": "f32", **uses, **changes}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 99}, "format 99"),
        ({"strategy": None}, "split strategy 'None' does not exist"),
        ({"strategy": "finer"}, "split strategy 'finer' does not exist"),
        ({"formats": {"name": "f32"}}, "is not complete"),
        (formats(weights="f33"), "'f33'"),
        (formats(table_and_head="f3"), "'f3'"),
        (formats(cache="f9"), "type 'f9'"),
        ({"model": {}}, "model has no model_type"),
        ({"layers": 4}, "has 4 layers, but its model's graph 3"),
        ("cut", "not JSON"),
        ("gone", "cannot be read"),
        ([], "no build configuration"),
    ],
)
def test_a_wrong_configuration_is_one_line(
    change: Any, words: str, copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    text = copied.config.read_text()
    if change == "cut":
        copied.config.write_text(text[: len(text) // 2])
    elif change == "gone":
        copied.config.unlink()
    elif isinstance(change, list):
        copied.config.write_text("[]")
    else:
        copied.config.write_text(json.dumps({**json.loads(text), **change}))
    message = error(capsys, copied.import_model())
    assert words in message


def test_an_import_of_another_configuration_is_not_compiled(
    copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    other = copied.folder / "other"
    assert copied.gen_config("--strategy", "block") == 0
    message = error(capsys, copied.compile())
    assert "another configuration" in message and not other.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "finer"], "'finer' does not exist"),
        (["--target-cpu", "nonsense", "--target-features", "+x"], "not a recognized processor"),
        (["--target-features", "avx2"], "each feature begins with + or -"),
        (["--target-triple", "bogus"], "does not know this triple"),
        (["--target-triple", "riscv64-unknown-linux-gnu"], "has no vectors"),
    ],
)
def test_wrong_options_of_gen_config(
    arguments: list[str], words: str, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in error(capsys, project.gen_config(*arguments))
    assert not project.config.exists()


def test_a_configuration_or_bundle_that_cannot_be_written_is_one_line(
    project: Project, compiled: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (project.folder, project.spec / "config.json"):
        project.config = path
        assert f"--output {path} cannot be written" in error(capsys, project.gen_config())
    pack = ("pack", "--build-dir", compiled.build, "-o", project.spec / "bundles")
    assert "rank0-of-2.zip cannot be written" in error(capsys, project.run(*pack))


def test_a_time_report_is_checked_before_anything_is_built(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    report = project.folder / "none" / "times.json"
    model = ("--spec", project.spec, "--local-model", project.model, "--build-dir", project.build)
    message = error(capsys, project.run("build", *model, "--time-report", report))
    assert f"--time-report {report} cannot be written" in message
    assert not project.build.exists()


@pytest.mark.parametrize("command", ["import", "compile", "pack", "run", "inspect"])
def test_a_build_directory_that_is_not_there_is_one_line(
    command: str, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    build = ("--build-dir", project.build)
    given: dict[str, tuple[object, ...]] = {
        "import": ("--config", project.config),
        "compile": ("--config", project.config),
        "pack": (*build, "-o", project.folder),
        "run": (*build, "--prompt", "Hi", "--cache-dir", project.cache),
        "inspect": (project.build,),
    }
    if command == "run":
        with pytest.raises(SystemExit) as ended:  # a session ends its process
            project.run(command, *given[command])
        code = int(ended.value.code or 0)
    else:
        code = project.run(command, *given[command])
    assert str(project.build) in error(capsys, code)


def test_a_strategy_that_does_not_exist_is_one_line_before_anything_is_compiled(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--spec", project.spec, "--local-model", project.model)
    empty = project.folder / "empty"
    for command in ("build", "verify"):
        arguments = (*model, "--strategy", "finer", "--cache-dir", empty)
        assert "'finer' does not exist" in error(capsys, project.run(command, *arguments))
    assert not empty.exists()


def test_a_rank_outside_the_world(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.gen_config()
    message = error(capsys, project.import_model("--rank", 2, "--world", 2))
    assert "--rank 2 does not exist in a world of 2" in message


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
    manifest = tmp_path / "weights" / weight_files.MANIFEST
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
    packed = weight_files.pack_parameters(parameters, open_checkpoint(compiled.model), 1)
    for parameter in parameters:
        assert np.array_equal(mapped[parameter], packed[parameter])
        assert mapped[parameter].ctypes.data % 64 == 0
        assert not mapped[parameter].flags.writeable
    assert map_weights(folder, parameters, (compiled.model, "f16")) is None


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


def test_a_build_directory_with_another_configuration_is_not_run_or_packed(
    copied: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert copied.gen_config("--variant", "bf16") == 0
    capsys.readouterr()
    build = ("--build-dir", copied.build)
    with pytest.raises(SystemExit):
        copied.run("run", *build, "--prompt", "Hi", "--cache-dir", copied.cache)
    assert "was imported from another configuration" in error(capsys, 2)
    for command in (
        ("pack", *build, "-o", copied.folder / "bundles"),
        ("run-partition", copied.build, "--random", 1, "--output", copied.folder / "out.npz"),
    ):
        assert "was imported from another configuration" in error(capsys, copied.run(*command))
    assert copied.gen_config() == 0
    assert copied.run("pack", *build, "-o", copied.folder / "bundles") == 0


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


def test_an_import_of_the_same_leaves_it_compiled(copied: Project) -> None:
    directory = BuildDirectory(copied.build)
    before = directory.read_manifest().objects
    assert copied.import_model("--world", 2, "--debug-wrappers") == 0
    assert directory.read_manifest().objects == before
    assert copied.gen_config("--variant", "bf16") == 0
    assert copied.import_model("--world", 2) == 0
    assert not any(entry.file for entry in directory.read_manifest().objects)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("--build-dir", ["--variant", "bf16"], "--variant bf16 cannot change"),
        ("--build-dir", ["--exact"], "--exact cannot change"),
        ("--bundle", ["--kv-cache-dtype", "int8"], "--kv-cache-dtype int8 cannot change"),
        ("--bundle", ["--split", "2,1"], "--split 2,1 cannot change"),
        ("--bundle", ["--balance", "memory"], "--balance memory cannot change"),
    ],
)
def test_options_that_what_is_built_has_decided_are_refused(
    source: str,
    options: list[str],
    words: str,
    compiled: Project,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = compiled.run("run", source, compiled.build, "--prompt", "Hi", *options)
    message = error(capsys, code)
    assert words in message and str(compiled.build) in message


def test_the_structure_is_verified_without_weights(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = project.folder / "bare"
    bare.mkdir()
    shutil.copy(project.model / "config.json", bare)
    model = ("--spec", project.spec, "--local-model", bare, "--cache-dir", project.cache)
    assert project.run("verify", *model, "--world", 2) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert "safetensors" in error(
        capsys, project.run("verify", *model, "--numeric", "--prompt", "Hi")
    )


def test_inspect_shows_a_configuration(
    compiled: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compiled.run("inspect", compiled.config) == 0
    shown = capsys.readouterr().out
    assert "qwen2" in shown and "context: 64" in shown
