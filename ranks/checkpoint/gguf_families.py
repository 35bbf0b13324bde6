"""What single GGUF architectures add to the configuration that all of them share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.gguf_fields import Fields
from buddy_pipeline.ranks.checkpoint.gguf_header import GgufHeader
from buddy_pipeline.ranks.checkpoint.gguf_rope import DEFAULT_BASE

_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")

# llama.cpp tells Gemma's 27B models by their layers, as their attention is scaled differently.
_GEMMA2_27B_LAYERS = 46
_GEMMA3_27B_LAYERS = 62

# Gemma 3 has one layer in six with full attention; the file does not say.
_GEMMA3_PATTERN = 6
_GEMMA3_GLOBAL_BASE = 1_000_000.0


def _has_bias(header: GgufHeader, config: dict[str, Any], *modules: str) -> bool:
    """Whether `modules` have biases; transformers has one option for all of them."""
    present = {
        f"blk.{layer}.{module}.bias" in header.tensors
        for layer in range(config["num_hidden_layers"])
        for module in modules
    }
    if len(present) > 1:
        raise UserError(
            f"{header.path}: only some of {', '.join(modules)} have a bias tensor, which "
            f"{config['model_type']} models cannot have; the file is damaged or of a newer kind"
        )
    return True in present


def _biases(header: GgufHeader, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": _has_bias(header, config, *_ATTENTION),
        "mlp_bias": _has_bias(header, config, "ffn_gate", "ffn_up", "ffn_down"),
    }


def _llama(header: GgufHeader, fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Llama, or Mistral or Mixtral, which GGUF calls llama too: with a window it can only be
    Mistral, with experts Mixtral."""
    biases = _biases(header, config)
    window = fields.window("attention.sliding_window")
    experts = _experts(header, fields)
    if window is None and not experts:
        return biases
    key = "expert_count" if experts else "attention.sliding_window"
    if any(biases.values()):
        raise fields.error(key, "absent in a model with biases")
    if experts:
        count, used = experts
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "sliding_window": window,
            "num_local_experts": count,
            "num_experts_per_tok": used,
        }
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window,
    }


def _qwen3(header: GgufHeader, fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": _has_bias(header, config, *_ATTENTION)}


def _experts(header: GgufHeader, fields: Fields) -> tuple[int, int] | None:
    """How many experts there are and how many a token gets, None for a model without."""
    if fields.window("expert_count"):
        count, used = fields.size("expert_count"), fields.size("expert_used_count")
        if used > count:
            raise fields.error("expert_used_count", f"at most the number of experts, {count}")
        return count, used
    stray = next((name for name in header.tensors if "_exps." in name), None)
    if stray is not None:
        raise fields.error("expert_count", f"positive in a file with a tensor {stray}")
    return None


def _qwen3moe(header: GgufHeader, fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp divides the weights of a token's experts by their sum, as published models do."""
    experts = _experts(header, fields)
    if experts is None:
        raise fields.error("expert_count", "the number of experts")
    return _qwen3(header, fields, config) | {
        "num_experts": experts[0],
        "num_experts_per_tok": experts[1],
        "moe_intermediate_size": fields.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma2(header: GgufHeader, fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(config, _GEMMA2_27B_LAYERS),
        "sliding_window": fields.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
    }


def _gemma3(header: GgufHeader, fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3 has two rotary bases; scaling applies to layers with full attention only."""
    window = fields.window("attention.sliding_window")
    layers = range(1, config["num_hidden_layers"] + 1)
    is_full = [window is None or layer % _GEMMA3_PATTERN == 0 for layer in layers]
    extra = {
        "query_pre_attn_scalar": _query_scalar(config, _GEMMA3_27B_LAYERS),
        "layer_types": ["full_attention" if full else "sliding_attention" for full in is_full],
        "rope_parameters": {
            "full_attention": config["rope_parameters"]
            | {"rope_theta": fields.number("rope.freq_base", _GEMMA3_GLOBAL_BASE)},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": fields.number("rope.freq_base_swa", DEFAULT_BASE),
            },
        },
    }
    if window is not None:
        extra["sliding_window"] = window
    if "final_logit_softcapping" in fields:
        extra["final_logit_softcapping"] = fields.number("final_logit_softcapping")
    return extra


def _query_scalar(config: dict[str, Any], layers_27b: int) -> int:
    """Gemma's `query_pre_attn_scalar`, which GGUF does not store."""
    if config["num_hidden_layers"] == layers_27b:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _granite(header: GgufHeader, fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return _biases(header, config) | {
        "attention_multiplier": fields.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "logits_scaling": fields.number("logit_scale", 1.0),
    }


def _starcoder2(header: GgufHeader, fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": _has_bias(header, config, *_ATTENTION, "ffn_up", "ffn_down")}


def _phi3(header: GgufHeader, fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {"sliding_window": fields.window("attention.sliding_window")}
    if "rope.scaling.original_context_length" in fields:
        original = fields.size("rope.scaling.original_context_length")
        extra["original_max_position_embeddings"] = original
    return extra


def _nothing(header: GgufHeader, fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """An architecture's own part of the configuration.

    `extra` returns entries that are added to (or replace) those of the shared configuration it is
    given; `used` are the result-changing fields that it takes into account.
    """

    extra: Callable[[GgufHeader, Fields, dict[str, Any]], dict[str, Any]] = _nothing
    used: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, ("attention.sliding_window", "expert_count")),
    "qwen3": Family(_qwen3),
    "qwen3moe": Family(_qwen3moe, ("expert_count",)),
    "gemma2": Family(
        _gemma2,
        ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
    ),
    "gemma3": Family(
        _gemma3,
        ("attention.sliding_window", "final_logit_softcapping", "rope.freq_base_swa"),
    ),
    "granite": Family(
        _granite, ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
    ),
    "starcoder2": Family(_starcoder2),
    "phi3": Family(_phi3, ("attention.sliding_window", "rope.scaling.attn_factor")),
}
