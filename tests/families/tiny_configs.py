"""A tiny configuration for any causal language model that transformers knows, from one table.

A configuration class takes from the table whatever fields it has; what it derives from them it
derives itself. Few families need a field of their own to agree with the rest.
"""

from typing import Any

VOCABULARY = 131
PADDING = 0
LAYERS = 4  # enough for patterns of two and of four layers
WINDOW = 5  # shorter than any prompt here, so that a window left out is seen

_HIDDEN, _HEADS, _KV_HEADS, _HEAD = 64, 4, 2, 16
_INNER, _EXPERT, _EXPERTS = 96, 32, 4
_POSITIONS = 64

_SIZES: dict[str, Any] = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "emb_dim", "dim"], _HIDDEN),
    **dict.fromkeys(["embedding_size", "input_embedding_size", "output_embedding_size"], _HIDDEN),
    **dict.fromkeys(["word_embed_proj_dim", "lru_width", "attention_hidden_size"], _HIDDEN),
    **dict.fromkeys(
        ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], LAYERS
    ),
    **dict.fromkeys(["num_decoder_layers", "encoder_layers", "num_encoder_layers"], LAYERS),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], _HEADS),
    **dict.fromkeys(["attention_heads", "decoder_attention_heads"], _HEADS),
    **dict.fromkeys(["encoder_attention_heads", "num_decoder_attention_heads"], _HEADS),
    **dict.fromkeys(["num_encoder_attention_heads", "swa_num_attention_heads"], _HEADS),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "kv_n_heads"], _KV_HEADS),
    **dict.fromkeys(["swa_num_key_value_heads", "num_global_key_value_heads"], _KV_HEADS),
    **dict.fromkeys(["head_dim", "global_head_dim", "swa_head_dim", "d_head", "dim_head"], _HEAD),
    **dict.fromkeys(["kv_channels", "v_head_dim", "qk_nope_head_dim", "swa_v_head_dim"], _HEAD),
    **dict.fromkeys(["qk_rope_head_dim", "rotary_dim"], _HEAD // 2),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 24),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim"], _INNER),
    **dict.fromkeys(["encoder_ffn_dim", "ffn_hidden_size", "dff", "dim_ff", "d_inner"], _INNER),
    **dict.fromkeys(["feed_forward_size", "dense_intermediate_size"], _INNER),
    **dict.fromkeys(["intermediate_size_mlp", "prefix_dense_intermediate_size"], _INNER),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], _EXPERT),
    **dict.fromkeys(["expert_ffn_hidden_size", "shared_intermediate_size"], _EXPERT),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], _EXPERTS),
    **dict.fromkeys(["moe_num_experts", "zero_expert_num"], _EXPERTS),
    **dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k"], 2),
    **dict.fromkeys(["top_k_experts", "num_experts_per_token"], 2),
    **dict.fromkeys(["n_group", "topk_group", "n_shared_experts"], 1),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], _POSITIONS),
    **dict.fromkeys(["max_seq_len", "max_target_positions", "context_length"], _POSITIONS),
    **dict.fromkeys(["sliding_window", "sliding_window_size", "window_size"], WINDOW),
    **dict.fromkeys(["attention_window_size", "local_attention"], WINDOW),
    "sliding_window_pattern": 2,
    "attention_chunk_size": WINDOW,
    "full_attn_idxs": [1, 3],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(["vocab_size", "vocab_size_per_layer_input"], VOCABULARY),
    "unpadded_vocab_size": VOCABULARY,
    "type_vocab_size": 2,
    "pad_token_id": PADDING,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Encoders that can be decoders are, without anything to attend across to.
    "is_decoder": True,
    "add_cross_attention": False,
}

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
#: Fields that a family needs besides, or in place of the table's; None leaves a field to the class.
_OF_FAMILIES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY}
    },
    "dbrx": {"attn_config": {"kv_n_heads": _KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * (LAYERS // 2)},
    "zaya": {"num_experts_per_tok": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
}

#: Nested configurations that are not of the language model.
_OTHER_PARTS = ("vision", "audio", "image", "encoder", "depth")


def tiny_config(model_type: str) -> Any:
    """The configuration object of a tiny random model of this type."""
    from transformers import CONFIG_MAPPING

    return _tiny(CONFIG_MAPPING[model_type], _OF_FAMILIES.get(model_type, {}))


def _tiny(kind: Any, own: dict[str, Any]) -> Any:
    fields = getattr(kind, "__dataclass_fields__", {})
    given = {name: value for name, value in _SIZES.items() if name in fields}
    for name, part in getattr(kind, "sub_configs", {}).items():
        if not name.startswith(_OTHER_PARTS):
            if not hasattr(part, "__dataclass_fields__"):  # any type: the one it has by default
                part = type(getattr(kind(), name))
            given[name] = _tiny(part, {}).to_dict()
    if "qk_rope_head_dim" in fields:
        # Latent attention: the head size is that of the rotary part, and no heads share keys.
        given["head_dim"] = given["qk_rope_head_dim"]
        given["num_key_value_heads"] = _HEADS
    given.update(own)
    return kind(**{name: value for name, value in given.items() if value is not None})
