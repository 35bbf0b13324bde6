"""Conversions that cannot be are refused before anything is written."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from buddy_pipeline.compile.manifest import Parameter, WeightPart
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.quantising import plan_conversion


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
