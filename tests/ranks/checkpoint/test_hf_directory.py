"""Hugging Face directories: whole and sharded weights, tokenizer sources, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import open_checkpoint

CONFIG = {"model_type": "llama", "eos_token_id": 2, "bos_token_id": 1}


def model(path: Path, config: dict[str, Any] = CONFIG, **tensors: np.ndarray) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors or {"t": np.ones((2, 2), np.float32)}, path / "model.safetensors")
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2"])
def test_weights_of_a_saved_model_come_back(checkpoint: Callable[..., Path], family: str) -> None:
    path = checkpoint(family)
    opened = open_checkpoint(path)
    expected = load_file(path / "model.safetensors")
    assert opened.config["model_type"] == family
    for name, values in expected.items():
        assert opened.tensors[name].shape == values.shape
        np.testing.assert_array_equal(opened.read(name), values)
        np.testing.assert_array_equal(opened.read_rows(name, 1, 4), values[1:4])
    assert opened.tokenizer.json_path == path / "tokenizer.json"
    assert opened.tokenizer.eos_ids == (257,)


def test_shards_are_one_model(checkpoint: Callable[..., Path]) -> None:
    whole = open_checkpoint(checkpoint("llama"))
    sharded = open_checkpoint(checkpoint("llama", max_shard_size="100KB"))
    assert set(sharded.tensors) == set(whole.tensors)
    assert sharded.element_count() == whole.element_count()
    for name in whole.tensors:
        np.testing.assert_array_equal(sharded.read(name), whole.read(name))


def test_bfloat16_is_widened_exactly(checkpoint: Callable[..., Path]) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    path = checkpoint("llama", dtype="bfloat16")
    opened = open_checkpoint(path)
    for name, values in load_torch(path / "model.safetensors").items():
        assert values.dtype == torch.bfloat16
        np.testing.assert_array_equal(opened.read(name), values.float().numpy())


def test_element_count_is_that_of_transformers(checkpoint: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    for family in ("qwen2", "gpt2", "gemma2", "llama"):
        path = checkpoint(family)
        expected = AutoModelForCausalLM.from_pretrained(path).num_parameters()
        assert open_checkpoint(path).element_count() == expected, family


def test_a_stored_copy_of_a_tied_head_and_buffers_do_not_count(tmp_path: Path) -> None:
    matrix = np.ones((3, 4), np.float32)
    tensors = {
        "model.embed_tokens.weight": matrix,
        "lm_head.weight": matrix,
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    tied = model(tmp_path / "tied", {**CONFIG, "tie_word_embeddings": True}, **tensors)
    untied = model(tmp_path / "untied", {**CONFIG, "tie_word_embeddings": False}, **tensors)
    assert open_checkpoint(tied).element_count() == 12
    assert open_checkpoint(untied).element_count() == 24


def test_names_are_found_with_and_without_the_base_models_prefix(tmp_path: Path) -> None:
    one = np.ones((1, 1), np.float32)
    opened = open_checkpoint(model(tmp_path / "m", **{"h.0.ln_1.weight": one, "model.norm": one}))
    assert opened.find("transformer.h.0.ln_1.weight").name == "h.0.ln_1.weight"
    assert opened.find("norm").name == "model.norm"
    assert opened.find("lm_head.weight", "model.norm").name == "model.norm"
    with pytest.raises(UserError, match=r"no tensor lm_head\.weight"):
        opened.find("lm_head.weight", "model.embed_tokens.weight")


def test_a_single_number_is_a_tensor(tmp_path: Path) -> None:
    opened = open_checkpoint(model(tmp_path, scale=np.array(2.5, np.float32)))
    assert opened.read("scale").shape == () and opened.read("scale") == 2.5


def test_numbers_that_json_has_not(tmp_path: Path) -> None:
    config = {**CONFIG, "limits": [0.0, {"__float__": "Infinity"}], "part": {"a": {"b": 1}}}
    opened = open_checkpoint(model(tmp_path, config))
    assert opened.config["limits"] == [0.0, float("inf")]
    assert opened.config["part"] == {"a": {"b": 1}}


def test_wrong_shapes_types_and_ranges_are_refused(tmp_path: Path) -> None:
    path = model(tmp_path / "m", t=np.ones((2, 3), np.float32), i=np.ones(3, np.int64))
    opened = open_checkpoint(path)
    assert opened.expect("t", shape=(2, 3)).name == "t"
    for shape in [(3, 2), (2, 3, 1), (6,)]:
        with pytest.raises(UserError, match=r"tensor t has shape \[2, 3\]"):
            opened.expect("t", shape=shape)
    with pytest.raises(UserError, match="tensor i has type I64"):
        opened.expect("i", shape=(3,))
    with pytest.raises(UserError, match="tensor i has type I64"):
        opened.read("i")
    with pytest.raises(UserError, match="no tensor gone"):
        opened.read("gone")
    for start, stop in [(-1, 1), (0, 3), (2, 1)]:
        with pytest.raises(IndexError):
            opened.read_rows("t", start, stop)


def test_tokenizer_sources(tmp_path: Path) -> None:
    path = model(tmp_path / "m")
    bare = open_checkpoint(path).tokenizer
    assert (bare.json_path, bare.config, bare.gguf, bare.chat_template) == (None, {}, None, None)
    assert (bare.eos_ids, bare.bos_id, bare.add_bos) == ((2,), 1, None)

    write_json(path / "generation_config.json", {"eos_token_id": [7, 8]})
    settings = {"chat_template": "old", "add_bos_token": False}
    write_json(path / "tokenizer_config.json", settings)
    full = open_checkpoint(path).tokenizer
    assert (full.eos_ids, full.bos_id, full.add_bos) == ((7, 8), 1, False)
    assert (full.config, full.chat_template) == (settings, "old")

    templates = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    write_json(path / "tokenizer_config.json", {"chat_template": templates})
    assert open_checkpoint(path).tokenizer.chat_template == "d"
    (path / "chat_template.jinja").write_text("new")
    assert open_checkpoint(path).tokenizer.chat_template == "new"


def breaks(name: str, content: str | bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (path / name).write_bytes(data)

    return write


def sharded_with(weight_map: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        shutil.move(path / "model.safetensors", path / "one.safetensors")
        write_json(path / "model.safetensors.index.json", {"weight_map": weight_map})

    return write


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config.json": (lambda path: (path / "config.json").unlink(), "has no config.json"),
    "config not JSON": (breaks("config.json", "{"), "config.json is not valid JSON"),
    "config not UTF-8": (breaks("config.json", b"\xff"), "config.json is not UTF-8"),
    "config a list": (breaks("config.json", "[]"), "config.json holds [], not a JSON object"),
    "config without a type": (breaks("config.json", "{}"), "config.json: model_type must be"),
    "quantised": (
        breaks("config.json", '{"model_type": "x", "quantization_config": {"bits": 4}}'),
        "config.json has a quantization_config",
    ),
    "no weights": (
        lambda path: (path / "model.safetensors").unlink(),
        "neither model.safetensors nor model.safetensors.index.json",
    ),
    "truncated weights": (breaks("model.safetensors", b"\x10\0\0"), "too short"),
    "index without a map": (sharded_with(None), "has no object weight_map"),
    "index to another folder": (sharded_with({"t": "../one.safetensors"}), "tensor t is in ../one"),
    "index to nothing": (sharded_with({"t": ""}), "tensor t is in ''"),
    "shard missing": (sharded_with({"t": "two.safetensors"}), "two.safetensors is not a file"),
    "tensor missing in its shard": (
        sharded_with({"gone": "one.safetensors"}),
        "one.safetensors has no tensor gone",
    ),
    "tokenizer config not JSON": (breaks("tokenizer_config.json", "x"), "tokenizer_config.json"),
    "template a number": (
        breaks("tokenizer_config.json", '{"chat_template": 1}'),
        "chat_template must be a string",
    ),
    "end token a word": (
        breaks("generation_config.json", '{"eos_token_id": "</s>"}'),
        "eos_token_id is </s>",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_one_line_naming_it(tmp_path: Path, case: str) -> None:
    spoil, culprit = REFUSED[case]
    path = model(tmp_path / "m")
    spoil(path)
    with pytest.raises(UserError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert culprit in message
    assert str(path) in message
    assert message.isprintable()


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone does not exist"):
        open_checkpoint(tmp_path / "gone")
    (tmp_path / "m.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"m\.bin is not a directory and does not end in \.gguf"):
        open_checkpoint(tmp_path / "m.bin")
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(UserError, match=r"m\.gguf is empty"):
        open_checkpoint(tmp_path / "m.gguf")
