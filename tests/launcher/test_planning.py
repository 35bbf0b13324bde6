"""`plan` says what a split needs and does, from headers alone, and balances by it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from buddy_pipeline.compile.variant import VARIANTS
from buddy_pipeline.launcher import cli
from buddy_pipeline.launcher.balancing import first_ranges, measured_ranges
from buddy_pipeline.launcher.model import Model, open_model
from buddy_pipeline.launcher.model_cost import model_cost
from buddy_pipeline.launcher.settings import Balance, ModelSettings
from buddy_pipeline.partition.layers import BlockRole
from buddy_pipeline.ranks.measuring import BlockTimes
from tests.checkpoints import FAMILIES, MIXTURES


@pytest.fixture
def spec(tmp_path: Path, checkpoint: Callable[..., Path]) -> Path:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"hf_model_path": str(checkpoint("qwen2", num_hidden_layers=6))}))
    return path


def opened(tmp_path: Path, path: Path) -> Model:
    spec = tmp_path / "model.json"
    spec.write_text("{}")
    return open_model(ModelSettings(spec=str(spec), variant=None, local_model=path))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_a_model_are_the_whole(
    family: str, tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    model = opened(tmp_path, checkpoint(family))
    whole = model_cost(model).block(range(model.layers), BlockRole.SINGLE)
    assert whole.memory_bytes == 4 * model.checkpoint.element_count()
    # Every matrix is multiplied with once a token but the embeddings of tokens and positions.
    config = model.checkpoint.config
    matrices = [
        prod(info.shape)
        for info in model.checkpoint.parameters()
        if len(info.shape) == 2 and not any(e in info.name for e in ("embed", "wte", "wpe"))
    ]
    head = config["vocab_size"] * (config.get("hidden_size") or config["n_embd"])
    expected = 2 * (sum(matrices) + (head if model.checkpoint.ties_head else 0))
    assert expected <= whole.flops < 1.1 * expected


@pytest.mark.parametrize("family", MIXTURES)
def test_of_experts_a_token_reads_and_multiplies_with_those_it_chooses(
    family: str, tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    model = opened(tmp_path, checkpoint(family))
    config, parameters = model.checkpoint.config, model.checkpoint.parameters()
    whole = model_cost(model).block(range(model.layers), BlockRole.SINGLE)
    experts = sum(prod(i.shape) for i in parameters if ".experts." in i.name)
    share = config["num_experts_per_tok"] / (
        config.get("num_local_experts") or config["num_experts"]
    )
    assert experts
    assert whole.expert_bytes == pytest.approx(4 * experts)
    assert whole.chosen_bytes == pytest.approx(4 * experts * share)
    others = sum(prod(i.shape) for i in parameters if ".experts." not in i.name)
    assert whole.flops <= 2 * (others + experts * share) + 1
    assert whole.memory_bytes == pytest.approx(4 * (others + experts))


def test_a_16_bit_variant_needs_half(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    model = opened(tmp_path, checkpoint("llama"))
    full, half = (
        model_cost(replace(model, formats=VARIANTS[name])).block(
            range(model.layers), BlockRole.SINGLE
        )
        for name in ("f32", "bf16")
    )
    assert half.cache_bytes == full.cache_bytes / 2
    assert 0.5 <= half.memory_bytes / full.memory_bytes < 0.51


def test_memory_balance_takes_layers_from_the_ranks_with_the_big_matrices(
    tmp_path: Path, checkpoint: Callable[..., Path]
) -> None:
    model = opened(tmp_path, checkpoint("qwen2", num_hidden_layers=12, vocab_size=3000))
    ranges = first_ranges(model, 4, None, Balance.MEMORY, sequences=1)
    sizes = [len(block) for block in ranges]
    assert max(sizes[0], sizes[3]) < min(sizes[1], sizes[2])
    assert first_ranges(model, 2, (5, 7), Balance.EVEN, 1) == [range(7, 12), range(7)]


def test_measured_balance_moves_layers_from_the_slow_rank() -> None:
    slow = BlockTimes({0: 4.0, 1: 4.0, 2: 4.0}, rest=0.0)
    quick = BlockTimes({3: 1.0, 4: 1.0, 5: 1.0}, rest=1.0)
    assert [len(block) for block in measured_ranges(6, [quick, slow])] == [5, 1]


def test_measured_balance_knows_a_rank_that_had_no_layers() -> None:
    idle = BlockTimes({}, rest=0.0)
    busy = BlockTimes(dict.fromkeys(range(6), 1.0), rest=0.0)
    assert [len(block) for block in measured_ranges(6, [idle, busy])] == [3, 3]


@pytest.mark.parametrize("balance", ["even", "memory", "speed"])
def test_plan_prints_a_line_for_each_rank_and_both_speeds(
    spec: Path, balance: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["plan", "--spec", str(spec), "--world", "3", "--balance", balance])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[0].endswith("6 layers over 3 ranks, 16 sequences of up to 128 positions")
    split = next(line for line in lines if line.startswith("split ")).removeprefix("split ")
    assert sum(int(size) for size in split.split(",")) == 6
    assert [line.split()[0] for line in lines[4:7]] == ["0", "1", "2"]
    assert lines[7].startswith("one sequence: ")
    assert lines[8].startswith("16 sequences: ")


def test_numbers_of_one_are_singular(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--spec", str(spec), "--world", "1", "--sequences", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "6 layers over 1 rank, 1 sequence of up to" in lines[0]
    assert lines[-1].startswith("1 sequence: ") and lines[-1].endswith("in 1 microbatch")


@pytest.mark.parametrize(
    "given", [{"head_dim": "twelve"}, {"head_dim": -4}, {"num_key_value_heads": [1, 1, 1]}]
)
def test_a_size_that_is_no_count_is_named(
    given: dict[str, Any], spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "edited"
    shutil.copytree(json.loads(spec.read_text())["hf_model_path"], model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **given}))
    code = cli.main(["plan", "--spec", str(spec), "--local-model", str(model), "--world", "2"])
    ((name, value),) = given.items()
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert f"config has {name} {value!r}: it must be a whole number of 1 or more" in error


def test_plan_takes_the_hosts_of_a_file_and_says_what_does_not_fit(
    spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = {"count": 2, "memory_gb": 0.1, "bandwidth_gb_s": 10, "gflops": 100}
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps({"hosts": [host]}))
    arguments = ["plan", "--spec", str(spec), "--world", "2", "--hosts", str(hosts)]
    assert cli.main(arguments) == 1
    printed = capsys.readouterr().out
    assert printed.count("does not fit") == 2
    assert "supposing" not in printed
    assert cli.main([*arguments, "--balance", "speed"]) == 2
    assert "no split over 2 ranks fits their memory" in capsys.readouterr().err


def test_plan_of_a_thousand_ranks(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["plan", "--spec", str(spec), "--world", "1024", "--balance", "speed"])
    assert code == 0
    assert " 1023  " in capsys.readouterr().out
