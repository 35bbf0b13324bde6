"""The build commands on a tiny model: what each leaves, what the next takes, what is refused."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.lowering import lower_kernel
from buddy_pipeline.compile.target import host_target, named_target
from buddy_pipeline.launcher import session
from buddy_pipeline.launcher.run_defaults import RunDefaults
from buddy_pipeline.launcher.settings import PipelineSettings
from buddy_pipeline.ranks.scheduler import Limits, Scheduler
from buddy_pipeline.ranks.slots import Slots
from tests.launcher.project import Project, error


def test_the_configuration_has_everything_resolved(project: Project) -> None:
    assert project.gen_config("--strategy", "fine", "--target-cpu", "x86-64-v3") == 0
    config = json.loads(project.config.read_text())
    assert (config["context"], config["layers"], config["strategy"]) == (64, 3, "fine")
    assert config["target"]["cpu"] == "x86-64-v3" and config["target"]["vector_bits"] == 256
    assert config["model"]["model_type"] == "qwen2"
    assert config["shapes"]["hidden_size"] == 60


def test_what_the_spec_says_on_running_is_kept_and_resolved(project: Project) -> None:
    said = {"num_threads": 3, "prefill_chunk": True, "tiered_kv_cache": {"cache_sizes": "20, 32"}}
    project.spec.write_text(json.dumps({"max_token_len": 64, **said}))
    assert project.gen_config() == 0
    tiers = {"threads": 3, "prefill_chunk": 64, "kv_tiers": [32, 64]}
    assert json.loads(project.config.read_text())["run"] == tiers
    project.spec.write_text("{}")
    assert project.gen_config() == 0
    defaults = {"threads": None, "prefill_chunk": None, "kv_tiers": [128]}
    assert json.loads(project.config.read_text())["run"] == defaults


def test_how_a_model_is_run_may_be_edited_in_a_compiled_directory(
    copied: Project, tmp_path: Path
) -> None:
    config = json.loads(copied.config.read_text())
    config["run"] = {"threads": 2, "prefill_chunk": 5, "kv_tiers": [32, 64]}
    copied.config.write_text(json.dumps(config))
    expected = RunDefaults(2, 5, (32, 64))
    assert copied.open().defaults == expected
    assert copied.run("pack", "--build-dir", copied.build, "-o", tmp_path / "bundles") == 0
    assert copied.open(bundle=tmp_path / "bundles").defaults == expected


@pytest.mark.parametrize(("option", "chunk"), [(None, 5), (7, 7)])
def test_a_built_directory_is_run_as_it_says_unless_options_say_otherwise(
    option: int | None, chunk: int, copied: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(copied.config.read_text())
    config["run"] = {"threads": 1, "prefill_chunk": 5, "kv_tiers": [32, 64]}
    copied.config.write_text(json.dumps(config))
    assert copied.import_model() == 0 and copied.compile() == 0
    made: list[tuple[Limits, Slots]] = []

    def scheduler(limits: Limits, slots: Slots) -> Scheduler:
        made.append((limits, slots))
        return Scheduler(limits, slots)

    monkeypatch.setattr(session, "Scheduler", scheduler)
    settings = PipelineSettings(
        spec="", build_dir=copied.build, cache_dir=copied.cache, prefill_chunk=option
    )
    with session.open_session(settings, library=True):
        pass
    ((limits, slots),) = made
    assert (limits.prefill_chunk, slots._tiers) == (chunk, (32, 64))


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


def formats(**changes: str) -> dict[str, object]:
    """A configuration's formats, f32 but for `changes`."""
    uses = dict.fromkeys(("weights", "table_and_head", "rest", "cache"), "f32")
    return {"formats": {"name": "f32", **uses, **changes}}


def target(**changes: object) -> dict[str, object]:
    """A configuration's target, x86-64-v3 but for `changes`."""
    return {"target": {**asdict(named_target("x86-64-v3")), **changes}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 99}, "format 99"),
        ({"strategy": None}, "split strategy 'None' does not exist"),
        ({"strategy": "finer"}, "split strategy 'finer' does not exist"),
        ({"formats": {"name": "f32"}}, "formats: weights is missing"),
        ({"formats": []}, "formats is []: it must be an object"),
        (formats(weights="f33"), "'f33'"),
        (formats(table_and_head="f3"), "'f3'"),
        (formats(cache="f9"), "type 'f9'"),
        ({"model": {}}, "model has no model_type"),
        ({"layers": 4}, "has 4 layers, but its model's graph 3"),
        ({"run": {"threads": 0, "prefill_chunk": 1, "kv_tiers": []}}, "threads has 0"),
        ({"run": {"threads": 1, "prefill_chunk": "x", "kv_tiers": []}}, "prefill_chunk has 'x'"),
        ({"run": {"threads": 1, "prefill_chunk": 1, "kv_tiers": [True]}}, "kv_tiers has True"),
        ({"run": {"threads": 1, "prefill_chunk": 1, "kv_tiers": 64}}, "kv_tiers is 64"),
        ({"run": {}}, "run: threads is missing"),
        ({"run": 5}, "run is 5: it must be an object"),
        (
            {"run": {"threads": 1, "prefill_chunk": 1, "kv_tiers": [], "thread": 2}},
            "run: key 'thread' is unknown: did you mean 'threads'?",
        ),
        ({"context": 1e9}, "context is 1000000000.0: it must be a whole number"),
        ({"context": -1}, "context is -1: it must be 1 or more"),
        ({"layers": "3"}, "layers is '3': it must be a whole number"),
        ({"sharing": "some"}, "sharing 'some' is unknown: known are"),
        ({"contexts": 64}, "key 'contexts' is unknown: did you mean 'context'?"),
        ({"model_path": 3}, "model_path is 3: it must be a text"),
        ({"model": 3}, "model is 3: it must be an object"),
        ({"target": 5}, "target is 5: it must be an object"),
        (target(vector_bits="a"), "target: vector_bits is 'a': it must be a whole number"),
        (target(vector_bits=64), "target: vector_bits is 64: it must be one of 128, 256, 512"),
        (target(bf16_dot=1), "target: bf16_dot is 1: it must be true or false"),
        (target(cpu="nonsense"), "'nonsense' is not a recognized processor"),
        (target(features="x"), "each feature begins with + or -"),
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
