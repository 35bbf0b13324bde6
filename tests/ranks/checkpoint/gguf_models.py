"""Tiny GGUF models, converted from random transformers models by llama.cpp's rules.

The rules are written here in the converter's direction, independently of the reader; that they are
llama.cpp's own is shown by `test_gguf_semantics.py`, which lets llama.cpp run the files.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quants
from gguf.constants import MODEL_ARCH_NAMES

from tests.compile.gguf_blocks import random_blocks

LAYERS = 2
VOCAB_SIZE = 288
CONTEXT = 64

#: Types whose blocks the gguf package reads and does not write.
K_TYPES = (GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K)

# Bytes of hidden state are multiples of 32, so that every matrix can be stored in blocks.
_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 48,
}

# Long and short factors are equal, as llama.cpp chooses by the context it was made for and
# transformers by the length of the text.
_LONGROPE_SCALING = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0],
    "short_factor": [1.0, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0],
    "original_max_position_embeddings": CONTEXT,
}

# Name of a case -> (GGUF architecture, transformers model type, fields of its configuration).
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"rms_norm_eps": 1e-5}),
    "llama3_rope": (
        "llama",
        "llama",
        # Twelve frequencies a head, several of them within the scaling's bounds.
        {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 64}
        | {"head_dim": 64, "rope_parameters": _LLAMA3_SCALING},
    ),
    "llama_biased": ("llama", "llama", {"attention_bias": True, "tie_word_embeddings": True}),
    # Rows of 256 and 512 elements, for formats with such blocks.
    "llama_wide": (
        "llama",
        "llama",
        {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": True},
    ),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32, "rope_theta": 1000000.0}),
    "qwen3moe": (
        "qwen3moe",
        "qwen3_moe",
        {"head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}
        | {"moe_intermediate_size": 32},
    ),
    "mixtral": (
        "llama",
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
        | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
        | {"tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
        | {"num_hidden_layers": 7, "tie_word_embeddings": True},
    ),
    "gpt2": (
        "gpt2",
        "gpt2",
        {"n_embd": 64, "n_head": 4, "n_layer": LAYERS, "n_inner": 256, "n_positions": CONTEXT}
        | {"bos_token_id": 256, "eos_token_id": 257, "tie_word_embeddings": True},
    ),
    "olmo2": ("olmo2", "olmo2", {}),
    "granite": (
        "granite",
        "granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0}
        | {"residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "starcoder2": ("starcoder2", "starcoder2", {"tie_word_embeddings": True}),
    "phi3": ("phi3", "phi3", {"original_max_position_embeddings": CONTEXT}),
    "phi3_long": (
        "phi3",
        "phi3",
        {"max_position_embeddings": 2 * CONTEXT, "original_max_position_embeddings": CONTEXT}
        | {"rope_parameters": _LONGROPE_SCALING},
    ),
}


def random_model(case: str) -> Any:
    """Return the transformers model of a case, float32, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _, model_type, overrides = CASES[case]
    common = _DECODER if model_type != "gpt2" else {"vocab_size": VOCAB_SIZE}
    config = AutoConfig.for_model(model_type, **{**common, **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.dim() == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(0.2 * noise)
    return model


def write_gguf(
    path: Path,
    case: str,
    model: Any,
    matrices: GGMLQuantizationType = GGMLQuantizationType.F32,
    others: Mapping[str, GGMLQuantizationType] | None = None,
    **fields: Any,
) -> Path:
    """Convert `model` to a GGUF file at `path`, its matrices stored as `matrices`.

    `others` are the types of matrices whose names hold these texts. Types that the gguf package
    cannot write get random blocks.

    `fields` are extra metadata, keys with `__` for dots: integers, floats, booleans or strings.
    """
    architecture = CASES[case][0]
    writer = GGUFWriter(path, architecture)
    _write_shape(writer, architecture, model.config)
    _write_tokenizer(writer)
    for key, value in fields.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_string)(key.replace("__", "."), value)
    if CASES[case][2].get("rope_parameters") is _LLAMA3_SCALING:
        writer.add_tensor("rope_freqs.weight", _llama3_factors(model.config))
    if CASES[case][2].get("rope_parameters") is _LONGROPE_SCALING:
        for length in ("long", "short"):
            factors = np.array(_LONGROPE_SCALING[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(2) / math.log(CONTEXT)))
    for name, values in _converted(architecture, model):
        stored = values
        kind = next((k for text, k in (others or {}).items() if text in name), matrices)
        if values.ndim == 1 or "gate_inp" in name:
            kind = GGMLQuantizationType.F32
        elif kind in K_TYPES:
            outputs = values.size // values.shape[-1]
            stored = random_blocks(kind.name.lower(), outputs, values.shape[-1], largest=2e-4)
            stored = stored.reshape(*values.shape[:-1], -1)
        elif kind != GGMLQuantizationType.F32:
            stored = quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf_tensors(model: Any) -> dict[str, np.ndarray]:
    """Return the model's parameters by name, float32, a tied head left out."""
    names = [name for name, _ in model.named_parameters()]
    state = model.state_dict()
    return {name: state[name].numpy() for name in names}


def _converted(architecture: str, model: Any) -> list[tuple[str, np.ndarray]]:
    kind = next(k for k, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, 16)
    heads = getattr(model.config, "num_attention_heads", 1)
    kv_heads = getattr(model.config, "num_key_value_heads", heads)
    tensors = []
    for name, values in _without_joined_experts(hf_tensors(model)).items():
        if architecture in ("llama", "granite") and ".q_proj." in name:
            values = _permuted(values, heads)
        if architecture in ("llama", "granite") and ".k_proj." in name:
            values = _permuted(values, kv_heads)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        if architecture == "gpt2" and values.ndim == 2 and ".h." in name:
            values = values.T
        tensors.append((names.get_name(name, try_suffixes=(".weight", ".bias")), values))
    return tensors


def _without_joined_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacks called as the matrices that published checkpoints hold for each expert."""
    result = {}
    for name, values in tensors.items():
        module, _, matrix = name.rpartition(".")
        if matrix == "gate_up_proj":
            gate, up = np.split(values, 2, axis=1)
            result |= {f"{module}.gate_proj.weight": gate, f"{module}.up_proj.weight": up}
        else:
            result[f"{name}.weight" if matrix == "down_proj" else name] = values
    return result


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`: halves of a head become neighbours."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _llama3_factors(config: Any) -> np.ndarray:
    """llama.cpp's `LlamaModel.generate_extra_tensors`."""
    rope = config.rope_parameters
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    factors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / config.head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _write_shape(writer: GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "gpt2":
        writer.add_feed_forward_length(config.n_inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if "head_dim" in config.to_dict():
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    if architecture != "gemma2":
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture in ("llama", "granite"):
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    if architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(CONTEXT)
        writer.add_rope_dimension_count(head_dim)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _write_tokenizer(writer: GGUFWriter) -> None:
    """A byte-level vocabulary of as many tokens as the embedding has rows."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    special = [f"<special{i}>" for i in range(VOCAB_SIZE - len(alphabet) - 1)]
    merged = alphabet[65] + alphabet[66]
    types = [TokenType.NORMAL] * len(alphabet) + [TokenType.CONTROL] * len(special)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, *special, merged])
    writer.add_token_types([*types, TokenType.NORMAL])
    writer.add_token_merges([f"{alphabet[65]} {alphabet[66]}"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_eot_token_id(258)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
