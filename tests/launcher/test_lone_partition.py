"""`run-partition`: a partition alone makes what it makes in a whole run, and what the layer of
transformers makes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.manifest import Plan
from buddy_pipeline.launcher import cli
from buddy_pipeline.launcher.loading import StepSizes, open_engine
from buddy_pipeline.launcher.prebuilt import open_prebuilt
from buddy_pipeline.launcher.settings import PipelineSettings
from tests.checkpoints import VOCAB_SIZE

IDS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 37)


class Built:
    """A compiled build directory with debug wrappers, and the values of all its partitions."""

    def __init__(self, folder: Path, model: Path, strategy: str) -> None:
        self.model, self.cache = model, folder / "cache"
        self.build = folder / "build"
        spec = folder / "spec.json"
        spec.write_text('{"max_token_len": 64}')
        options = ["--spec", spec, "--local-model", model, "--strategy", strategy, "-j", 1]
        where = ["--build-dir", self.build, "--cache-dir", self.cache, "--debug-wrappers"]
        assert self.command("build", *options, *where) == 0
        self.plan: Plan = BuildDirectory(self.build).read_plan()
        self.ids = self.save("ids.npz", **{self.plan.token_input: IDS})
        self.all = folder / "all.npz"
        assert self.run("--inputs", self.ids, "--output", self.all) == 0

    def command(self, *arguments: object) -> int:
        return cli.main([str(word) for word in arguments])

    def run(self, *arguments: object) -> int:
        return self.command("run-partition", self.build, *arguments)

    def save(self, name: str, **values: Any) -> Path:
        path = self.build.parent / name
        np.savez(path, **values)
        return path


@pytest.fixture(scope="module", params=["coarse", "fine"])
def built(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: Callable[..., Path],
) -> Built:
    return Built(tmp_path_factory.mktemp("built"), checkpoint("llama"), request.param)


def test_every_partition_alone_makes_the_bits_of_the_whole(built: Built, tmp_path: Path) -> None:
    """In pieces of another size too, and although its file holds what others read."""
    whole = np.load(built.all)
    for partition in built.plan.partitions:
        out = tmp_path / "out.npz"
        how = ["--inputs", built.all, "--inputs", built.ids, "--output", out]
        assert built.run(partition.name, *how, "--tokens", len(IDS), "--step", 5) == 0
        alone = np.load(out)
        assert set(alone.files) == set(partition.outputs)
        for name in alone.files:
            np.testing.assert_array_equal(alone[name], whole[name])


def test_the_last_one_makes_the_logits_of_a_run(built: Built) -> None:
    cache = Cache.open(built.cache)
    model = open_prebuilt(PipelineSettings(spec="", build_dir=built.build), 0, 1, cache)
    with open_engine(model, 1, StepSizes(tokens=16, rows=16, slots=1), cache) as (engine, _):
        logits = np.concatenate([rows.copy() for rows in engine.score(0, IDS)])
    np.testing.assert_array_equal(np.load(built.all)[built.plan.result], logits)


def test_layers_make_the_hidden_states_of_transformers(built: Built) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(built.model, attn_implementation="eager")
    with torch.no_grad():
        found = model(torch.tensor(IDS)[None], output_hidden_states=True, use_cache=False)
    values = np.load(built.all)
    for layer, expected in enumerate(found.hidden_states[1:-1]):
        (crossing,) = built.plan.crossing(layer + 1)
        np.testing.assert_allclose(values[crossing.name], expected[0], rtol=0, atol=1e-4)
    logits = values[built.plan.result]
    np.testing.assert_allclose(logits, found.logits[0], rtol=0, atol=1e-4)


def test_a_wrapper_is_a_script_that_runs_its_partition(built: Built, tmp_path: Path) -> None:
    scripts = {path.stem for path in (built.build / "debug").glob("*.py")}
    assert scripts == {partition.name for partition in built.plan.partitions}
    last = built.plan.partitions[-1]
    script, out = built.build / "debug" / f"{last.name}.py", tmp_path / "out.npz"
    text = script.read_text()
    assert all(name in text for name in (*last.inputs, *last.outputs))
    ended = subprocess.run(
        [sys.executable, script, "--inputs", built.all, "--output", out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    np.testing.assert_array_equal(
        np.load(out)[built.plan.result], np.load(built.all)[built.plan.result]
    )


def test_random_values_follow_from_seed_and_name(built: Built, tmp_path: Path) -> None:
    outs = [tmp_path / f"{number}.npz" for number in range(3)]
    name = next(p.name for p in built.plan.partitions if p.unit == "1")
    for out, seed in zip(outs, (1, 1, 2), strict=True):
        assert built.run(name, "--random", seed, "--tokens", 3, "--output", out) == 0
    one, again, other = (np.load(out) for out in outs)
    for value in one.files:
        assert len(one[value]) == 3
        np.testing.assert_array_equal(one[value], again[value])
        assert not np.array_equal(one[value], other[value])


def test_mistakes_are_one_line(
    built: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = built.plan, tmp_path / "out.npz"
    layer = next(p for p in plan.partitions if p.unit == "1")
    whole = dict(np.load(built.all))
    name = next(n for n in layer.inputs if n != plan.position_input)
    wide = built.save("wide.npz", **{**whole, name: whole[name][:, :-1]})
    double = built.save("double.npz", **{**whole, name: whole[name].astype(float)})
    short = built.save("short.npz", **{**whole, name: whole[name][:-1]})
    far = built.save("far.npz", **{plan.token_input: IDS + VOCAB_SIZE})
    text = tmp_path / "text.npz"
    text.write_text("no archive")
    elements = whole[name].shape[1]
    cases: list[tuple[list[object], list[str]]] = [
        (["layer_1", "--inputs", built.all], ["'layer_1' does not exist", "layer1"]),
        ([layer.name, "--inputs", built.ids], [layer.name, f"[tokens, {elements}]", "--random"]),
        ([layer.name, "--inputs", wide], [name, f"[37, {elements - 1}]", f"[tokens, {elements}]"]),
        ([layer.name, "--inputs", double], [name, "float64"]),
        ([layer.name, "--inputs", short, "--tokens", 37], [name, "36", "37 tokens"]),
        (["--inputs", far], ["vocabulary", str(VOCAB_SIZE - 1)]),
        ([layer.name, "--random", 1, "--tokens", 999_999], ["999999 tokens", "--tokens"]),
        ([layer.name, "--inputs", text], ["text.npz", "npz"]),
        ([layer.name, "--inputs", tmp_path / "gone.npz"], ["gone.npz"]),
    ]
    capsys.readouterr()
    for arguments, named in cases:
        assert built.run(*arguments, "--output", out) == 2, arguments
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all(word in error for word in named), error
    assert not out.exists()
    nowhere = tmp_path / "no" / "out.npz"
    assert built.run(layer.name, "--inputs", built.all, "--output", nowhere) == 2
    assert built.command("run-partition", tmp_path, layer.name, "--output", out) == 2
