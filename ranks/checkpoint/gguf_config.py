"""Rebuilding a Hugging Face `config.json` from a GGUF file's metadata.

Keys that a configuration class has a right default for are left out; everything that the file
says about the model's shape and arithmetic is set.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.gguf_architectures import ARCHITECTURES
from buddy_pipeline.ranks.checkpoint.gguf_families import FAMILIES, Family
from buddy_pipeline.ranks.checkpoint.gguf_fields import Fields
from buddy_pipeline.ranks.checkpoint.gguf_header import GgufHeader
from buddy_pipeline.ranks.checkpoint.gguf_rope import (
    longrope_parameters,
    rope_parameters,
)

# Fields that change what a model computes, with the values that do not. One that an architecture's
# conversion does not use must have such a value: ignoring it would be silently wrong.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.freq_base_swa": (),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (0, 1),
    "use_parallel_residual": (False,),
}

# Rotary architectures whose norms subtract the mean; all others' are RMS norms.
_WITH_LAYER_NORM = frozenset({"starcoder2"})

_PHI3_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")


def hf_config(
    header: GgufHeader, architecture: str, factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return the content of the `config.json` the file was converted from.

    Args:
        architecture: `general.architecture`, a key of `ARCHITECTURES`.
        factors: the file's tensors of rotary factors, float32, by GGUF name.

    Raises:
        UserError: a field is missing, malformed, or says something that cannot be expressed.
    """
    fields = Fields(header, architecture)
    spec = ARCHITECTURES[architecture]
    shape = _gpt2 if architecture == "gpt2" else _decoder
    config = {
        "architectures": [spec.class_name],
        "model_type": spec.model_type,
        "vocab_size": _vocabulary(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **{f"{name}_token_id": _token_id(header, ggml) for name, ggml in _TOKEN_IDS.items()},
        **shape(header, fields, factors),
    }
    family = FAMILIES.get(architecture, Family())
    _check_neutral(fields, family.used)
    return config | family.extra(header, fields, config)


_TOKEN_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def _token_id(header: GgufHeader, name: str) -> int | None:
    value = header.fields.get(f"tokenizer.ggml.{name}_token_id")
    return value if type(value) is int else None


def _vocabulary(header: GgufHeader) -> int:
    """The rows of the embedding; token lists can be shorter and `vocab_size` is often absent."""
    if "token_embd.weight" not in header.tensors:
        raise UserError(f"{header.path} has no tensor token_embd.weight; convert it again")
    return header.tensors["token_embd.weight"].shape[0]


def _check_neutral(fields: Fields, used: tuple[str, ...]) -> None:
    for key, neutral in _NEUTRAL.items():
        if key not in used and key in fields and fields.value(key) not in neutral:
            raise fields.error(key, "absent, as this architecture is supported without it")


def _decoder(
    header: GgufHeader, fields: Fields, factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """The fields that all architectures with rotary embeddings share."""
    hidden = fields.size("embedding_length")
    heads = fields.size("attention.head_count")
    head_dim = fields.size("attention.key_length", max(1, hidden // heads))
    if fields.size("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", f"the key length, {head_dim}")
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": _layers(header, fields),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.size("context_length"),
    }
    if fields.architecture in _WITH_LAYER_NORM:
        config["norm_epsilon"] = fields.number("attention.layer_norm_epsilon")
    else:
        config["rms_norm_eps"] = fields.number("attention.layer_norm_rms_epsilon")
    rotary = fields.size("rope.dimension_count", head_dim)
    if fields.text("rope.scaling.type", "none") == "longrope" or _PHI3_FACTORS[0] in factors:
        config["rope_parameters"] = longrope_parameters(
            fields, *(_factors(header, factors, name, rotary) for name in _PHI3_FACTORS)
        )
    else:
        llama3 = "rope_freqs.weight"
        config["rope_parameters"] = rope_parameters(
            fields,
            _factors(header, factors, llama3, rotary) if llama3 in factors else None,
            rotary,
        )
    if rotary != head_dim:
        if rotary > head_dim or fields.architecture != "phi3":
            raise fields.error("rope.dimension_count", f"the head dimension, {head_dim}")
        config["rope_parameters"]["partial_rotary_factor"] = rotary / head_dim
    return config


def _layers(header: GgufHeader, fields: Fields) -> int:
    """The number of layers, bounded by the tensors there are before anything is built from it."""
    layers = fields.size("block_count")
    if layers > len(header.tensors):
        raise fields.error("block_count", f"at most the number of tensors, {len(header.tensors)}")
    return layers


def _factors(
    header: GgufHeader, factors: Mapping[str, np.ndarray], name: str, rotary: int
) -> np.ndarray:
    """Return one tensor of rotary factors, checked: float32 [rotary / 2], positive and finite."""
    if name not in factors:
        raise UserError(f"{header.path} has no tensor {name}; its rotary scaling needs it")
    values = factors[name]
    if values.shape != (rotary // 2,) or not (np.isfinite(values) & (values > 0)).all():
        raise UserError(
            f"{header.path}: tensor {name} must be {rotary // 2} positive numbers; "
            f"it has shape {list(values.shape)}"
        )
    return values


def _gpt2(header: GgufHeader, fields: Fields, factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return {
        "n_embd": fields.size("embedding_length"),
        "n_inner": fields.size("feed_forward_length"),
        "n_layer": _layers(header, fields),
        "n_head": fields.size("attention.head_count"),
        "n_positions": fields.size("context_length"),
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon"),
    }
