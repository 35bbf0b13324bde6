"""Experts stored one by one are read as stacks, whatever their files call them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import Checkpoint, open_checkpoint

EXPERTS, HIDDEN, INNER = 3, 8, 5
RNG = np.random.default_rng(0)
GATE, UP = (RNG.standard_normal((EXPERTS, INNER, HIDDEN), np.float32) for _ in range(2))
DOWN = RNG.standard_normal((EXPERTS, HIDDEN, INNER), np.float32)

NAMES = {
    "qwen": ("model.layers.0.mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("model.layers.0.block_sparse_moe.experts", ("w1", "w3", "w2")),
}


def tensors(style: str, dtype: type = np.float32) -> dict[str, np.ndarray]:
    module, names = NAMES[style]
    return {
        f"{module}.{number}.{name}.weight": np.ascontiguousarray(stack[number].astype(dtype))
        for name, stack in zip(names, (GATE, UP, DOWN), strict=True)
        for number in range(EXPERTS)
    }


def write(path: Path, stored: dict[str, np.ndarray]) -> Checkpoint:
    path.mkdir(exist_ok=True)
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    return open_checkpoint(path)


@pytest.mark.parametrize("style", NAMES)
def test_a_stack_has_the_gates_rows_before_those_of_up(tmp_path: Path, style: str) -> None:
    opened = write(tmp_path, tensors(style))
    both = opened.expect(
        "model.layers.0.mlp.experts.gate_up_proj", shape=(EXPERTS, 2 * INNER, HIDDEN)
    )
    expected = np.concatenate([GATE, UP], axis=1)
    assert (opened.read(both.name) == expected).all()
    assert (opened.read_rows(both.name, 1, 3) == expected[1:]).all()
    down = opened.expect("layers.0.mlp.experts.down_proj", shape=(EXPERTS, HIDDEN, INNER))
    assert (opened.read(down.name) == DOWN).all()
    assert opened.element_count() == 3 * DOWN.size


def test_outputs_are_counted_through_the_stack(tmp_path: Path) -> None:
    opened = write(tmp_path, tensors("qwen", np.float16))
    name = opened.find("model.layers.0.mlp.experts.gate_up_proj").name
    expected = np.concatenate([GATE, UP], axis=1).reshape(-1, HIDDEN).astype(np.float16)
    assert opened.keeps_outputs(name, transposed=False)
    for start in range(len(expected)):
        for stop in range(start, len(expected) + 1):
            assert (opened.read_outputs(name, start, stop) == expected[start:stop]).all()
            if start < stop:
                stored = opened.stored_outputs(name, start, stop).view(np.float16)
                assert (stored == expected[start:stop]).all()
    with pytest.raises(IndexError):
        opened.read_outputs(name, 0, len(expected) + 1)


def test_a_stack_in_the_file_is_read_in_the_same_way(tmp_path: Path) -> None:
    opened = write(tmp_path, {"experts.down_proj": DOWN})
    flat = DOWN.reshape(-1, INNER)
    assert (opened.read_outputs("experts.down_proj", 3, 17) == flat[3:17]).all()
    stored = opened.stored_outputs("experts.down_proj", 3, 17).view(np.float32)
    assert (stored == flat[3:17]).all()


def test_experts_without_a_gate(tmp_path: Path) -> None:
    stored = {name: t for name, t in tensors("qwen").items() if "gate_proj" not in name}
    opened = write(tmp_path, stored)
    name = opened.find("model.layers.0.mlp.experts.up_proj").name
    assert (opened.read(name) == UP).all()


def without(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda stored: stored.__delitem__(name)


def reshaped(name: str) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda stored: stored.update({name: np.ascontiguousarray(stored[name][1:])})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without("model.layers.0.mlp.experts.1.up_proj.weight"), "expert 1 .*lacks a matrix"),
        (without("model.layers.0.mlp.experts.0.down_proj.weight"), "expert 0 .*lacks a matrix"),
        (reshaped("model.layers.0.mlp.experts.2.gate_proj.weight"), "differ in shape"),
        (reshaped("model.layers.0.mlp.experts.2.down_proj.weight"), "differ in shape"),
    ],
)
def test_incomplete_experts_are_one_line(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None], named: str
) -> None:
    stored = tensors("qwen")
    change(stored)
    with pytest.raises(UserError, match=named) as error:
        write(tmp_path, stored)
    assert "\n" not in str(error.value) and "experts" in str(error.value)
