"""Random checkpoints have the shapes of the published models, and are what their files say."""

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest

from benchkit.gguf_export import export_gguf, rope_factors
from benchkit.published import SHAPES, published_config, tensor_shapes
from benchkit.random_weights import encode, file_size, write_random_weights
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import open_checkpoint

# As the models' pages on huggingface.co count them: a tied head once.
PUBLISHED_PARAMETERS = {
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-70b": 70_553_706_496,
}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 288}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL |= {"bos_token_id": 257, "eos_token_id": 258}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_as_many_parameters_as_the_published_model(name: str) -> None:
    tensors = list(tensor_shapes(published_config(name)))
    assert sum(prod(shape) for _, shape in tensors) == PUBLISHED_PARAMETERS[name]
    assert file_size(tensors, "bf16") == 2 * PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_are_those_of_the_transformers_class(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = published_config(name) | {"num_hidden_layers": 2}
    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **fields)
        )
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert dict(tensor_shapes(config)) == expected


def test_an_unknown_shape_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'qwen3-6b'.*qwen3-0\.6b"):
        published_config("qwen3-6b")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_weights_are_random_repeatable_and_of_the_deviation_they_should_have(
    tmp_path: Path, dtype: str
) -> None:
    folder = small_checkpoint(tmp_path / "a", "qwen2", dtype)
    again = small_checkpoint(tmp_path / "b", "qwen2", dtype)
    assert (folder / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    checkpoint = open_checkpoint(folder)
    matrix = checkpoint.read("model.layers.1.mlp.up_proj.weight")
    assert 0.018 < matrix.std() < 0.022
    assert abs(checkpoint.read("model.norm.weight").mean() - 1) < 0.02
    other = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    assert not np.array_equal(matrix, other)


def test_bf16_is_rounded_to_the_nearest_and_ties_to_even() -> None:
    import torch

    random = np.random.default_rng(0)
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32).view(np.float32)
    values = np.concatenate([random.standard_normal(1000, dtype=np.float32), ties])
    expected = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(encode(values, "bf16"), expected)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_a_gguf_file_holds_the_same_model(tmp_path: Path, kind: str) -> None:
    source = open_checkpoint(small_checkpoint(tmp_path / "hf", kind, "f32"))
    path = tmp_path / "model.gguf"
    export_gguf(source, path, "F32")
    written = open_checkpoint(path)
    assert written.tensors.keys() == source.tensors.keys()
    for name in source.tensors:
        np.testing.assert_array_equal(written.read(name), source.read(name))
    for key in ("hidden_size", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert written.config[key] == source.config[key]


def test_llama3_scaling_survives_the_way_to_gguf(tmp_path: Path) -> None:
    source = open_checkpoint(small_checkpoint(tmp_path / "hf", "llama", "f32"))
    export_gguf(source, tmp_path / "model.gguf", "Q8_0")
    written = open_checkpoint(tmp_path / "model.gguf")
    np.testing.assert_allclose(rope_factors(written.config), rope_factors(source.config), rtol=1e-5)


def test_a_quantised_gguf_file_is_near_the_weights(tmp_path: Path) -> None:
    source = open_checkpoint(small_checkpoint(tmp_path / "hf", "llama", "f32"))
    export_gguf(source, tmp_path / "model.gguf", "Q8_0")
    name = "model.layers.0.self_attn.q_proj.weight"
    written = open_checkpoint(tmp_path / "model.gguf")
    assert written.tensors[name].dtype == "Q8_0"
    np.testing.assert_allclose(written.read(name), source.read(name), atol=5e-4)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    source = open_checkpoint(small_checkpoint(tmp_path / "hf", "llama", "f32"))
    with pytest.raises(UserError, match="'Q3_K' cannot be written: use one of F32"):
        export_gguf(source, tmp_path / "model.gguf", "Q3_K")
    source.config["model_type"] = "gemma2"
    with pytest.raises(UserError, match="is a gemma2 model; GGUF is written for llama"):
        export_gguf(source, tmp_path / "model.gguf", "Q8_0")
    assert not (tmp_path / "model.gguf").exists()


def small_checkpoint(folder: Path, kind: str, dtype: str) -> Path:
    """A published shape of this model type, made small."""
    name = next(name for name, config in SHAPES.items() if config["model_type"] == kind)
    config = published_config(name) | SMALL
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_random_weights(folder / "model.safetensors", list(tensor_shapes(config)), dtype, seed=1)
    return folder
