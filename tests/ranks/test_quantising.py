"""Conversions that cannot be are refused; those that were interrupted go on."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from buddy_pipeline.compile.manifest import Parameter, WeightPart
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.checkpoint.quantised_directory import PARTIAL
from buddy_pipeline.ranks.quantising import convert, plan_conversion


def test_a_stack_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    tensors = {"mlp.experts.down_proj": np.ones((3, 4, 8), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    stack = WeightPart(("mlp.experts.down_proj",), (), (3, 4, 8), False)
    checkpoint = open_checkpoint(tmp_path)
    quantised = Parameter("panels", (stack,), 32, "w8a8")
    with pytest.raises(UserError, match=r"'mlp\.experts\.down_proj'.*--variant") as error:
        plan_conversion(checkpoint, [quantised], "w8a8", biased=True)
    assert "\n" not in str(error.value)
    kept = Parameter("panels", (stack,), 32, "bf16")
    assert not plan_conversion(checkpoint, [kept], "w8a8", biased=True).matrices


def test_what_an_interrupted_run_was_writing_does_not_stay(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_file({"a.weight": np.ones((8, 32), np.float32)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    matrix = WeightPart(("a.weight",), (), (8, 32), False)
    parameters = [Parameter("panels", (matrix,), 32, "w8a8")]
    conversion = plan_conversion(open_checkpoint(source), parameters, "w8a8", biased=True)

    def killed(count: int) -> None:
        raise SystemExit

    folder.mkdir()
    (folder / f".{PARTIAL}.0f1e").touch()  # the first thing that is written
    with pytest.raises(SystemExit):
        convert(conversion, folder, killed, [])
    # A process that is killed leaves these as well.
    (folder / f".{conversion.shard_name(0)}.4711").touch()
    (folder / ".tokenizer.json.00c0ffee").touch()
    convert(conversion, folder, lambda count: None, [])
    assert sorted(path.name for path in folder.iterdir()) == [
        conversion.shard_name(0),
        "model.safetensors.index.json",
        "quantization.json",
    ]
