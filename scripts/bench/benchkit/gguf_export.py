"""A checkpoint written as GGUF in a chosen number format, for llama.cpp and for our own reader.

The rules are those of llama.cpp's converter (`convert_hf_to_gguf.py`) for the decoders named in
`ARCHITECTURES`. Tensors are converted one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    TokenType,
    get_tensor_name_map,
    quant_shape_to_byte_shape,
    quants,
)
from gguf.constants import MODEL_ARCH_NAMES

from benchkit.byte_tokenizer import CHAT_TEMPLATE, gguf_tokens
from benchkit.q4_k import quantise_q4_k
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import Checkpoint
from buddy_pipeline.ranks.checkpoint.checkpoint import TensorInfo

#: By `model_type`, which is GGUF's name too.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
#: The formats that the gguf package can write, and Q4_K.
QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q4_K")
_BUFFERS = (".inv_freq",)


def check_quantisation(name: str) -> None:
    """Raises UserError for a format that `export_gguf` cannot write."""
    if name not in QUANTISATIONS:
        raise UserError(
            f"GGUF format {name!r} cannot be written: use one of {', '.join(QUANTISATIONS)}"
        )


def check_architecture(checkpoint: Checkpoint) -> None:
    """Raises UserError for a model that `export_gguf` cannot write."""
    kind = checkpoint.config["model_type"]
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{checkpoint.path} is a {kind} model; GGUF is written for {', '.join(ARCHITECTURES)}"
        )


def export_gguf(checkpoint: Checkpoint, path: Path, quantisation: str) -> None:
    """Writes matrices in `quantisation` (embedding and head too), vectors in f32.

    A matrix whose rows are no whole blocks of the format is written in F16. The tokenizer is the
    checkpoint's if that came from a GGUF file, else one token a byte. Raises UserError for what
    cannot be written.
    """
    check_quantisation(quantisation)
    check_architecture(checkpoint)
    config = checkpoint.config
    writer = GGUFWriter(path, config["model_type"])
    _add_configuration(writer, config, checkpoint.path.name)
    writer.add_file_type(LlamaFileType[_file_type(quantisation)])
    if checkpoint.tokenizer.gguf is not None:
        _copy_tokenizer(writer, checkpoint.tokenizer.gguf)
    else:
        _add_tokenizer(writer, config)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    wanted = [i for name, i in checkpoint.tensors.items() if not name.endswith(_BUFFERS)]
    names = _gguf_names(wanted, config)
    for info in wanted:
        kind = _format_of(info, quantisation)
        shape = quant_shape_to_byte_shape(info.shape, kind)
        size = math.prod(shape)
        writer.add_tensor_info(names[info.name], shape, np.dtype(np.uint8), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for info in wanted:
        values = _stored_values(checkpoint.read(info.name), info.name, config)
        kind = _format_of(info, quantisation)
        writer.write_tensor_data(_quantised(values, kind))
    writer.close()


def rope_factors(config: Mapping[str, Any]) -> np.ndarray | None:
    """What Llama 3 divides each rotary frequency by, float32 [head size / 2]; None without scaling.

    https://github.com/huggingface/transformers, modeling_rope_utils.py: long wavelengths are
    stretched by `factor`, short ones kept, those between interpolated. Raises UserError for other
    kinds of scaling.
    """
    scaling = _rope(config)
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"rope scaling {kind!r} cannot be written as GGUF here, only 'llama3'")
    head = _head_size(config)
    wavelengths = 2 * math.pi * scaling["rope_theta"] ** (np.arange(0, head, 2) / head)
    turns = scaling["original_max_position_embeddings"] / wavelengths
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def _add_configuration(writer: GGUFWriter, config: Mapping[str, Any], name: str) -> None:
    rope = _rope(config)
    head = _head_size(config)
    writer.add_name(name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: GGUFWriter, config: dict[str, Any]) -> None:
    tokens, special, merges = gguf_tokens(config)
    kinds = [TokenType.CONTROL if is_special else TokenType.NORMAL for is_special in special]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template(CHAT_TEMPLATE)


def _copy_tokenizer(writer: GGUFWriter, fields: Mapping[str, Any]) -> None:
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)


def _gguf_names(tensors: list[TensorInfo], config: Mapping[str, Any]) -> dict[str, str]:
    architecture = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}[config["model_type"]]
    names = get_tensor_name_map(architecture, config["num_hidden_layers"])
    found = {t.name: names.get_name(t.name, try_suffixes=(".weight", ".bias")) for t in tensors}
    for name, known in found.items():
        if known is None:
            raise UserError(f"tensor {name!r} has no name in GGUF's {config['model_type']} models")
    return {name: known for name, known in found.items() if known is not None}


def _format_of(info: TensorInfo, quantisation: str) -> GGMLQuantizationType:
    if len(info.shape) == 1:
        return GGMLQuantizationType.F32
    wanted = GGMLQuantizationType[quantisation]
    block, _ = quants.GGML_QUANT_SIZES[wanted]
    return wanted if info.shape[-1] % block == 0 else GGMLQuantizationType.F16


def _quantised(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind is GGMLQuantizationType.Q4_K:
        return quantise_q4_k(values)
    return quants.quantize(values, kind).view(np.uint8)


def _file_type(quantisation: str) -> str:
    names = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_S"}
    return names.get(quantisation, f"MOSTLY_{quantisation}")


def _stored_values(values: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """A tensor as GGUF has it: llama's query and key rows with rotary pairs side by side."""
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config["num_key_value_heads"],
    }.get(name.split(".")[-2])
    if config["model_type"] != "llama" or heads is None:
        return values
    pairs = values.reshape(heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters, in the new spelling of a config (`rope_parameters`) or the old one."""
    if "rope_parameters" in config:
        return dict(config["rope_parameters"])
    return {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
