"""The attention op: what transformers' classes call while they are exported, in place of attention.

A function registered with transformers hands every layer's query, key and value to one custom op,
so a graph holds attention as one node, and a mask function that returns None leaves masks out.
"""

from typing import Any

import torch

from buddy_pipeline.partition.errors import UserError

_NAME = "buddy_pipeline"


@torch.library.custom_op("bp::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Causal attention of one layer: query [1, heads, 1, key], key [1, kv heads, 1, key], value
    [1, kv heads, 1, value] to [1, 1, heads, value]. Only traced, never run."""
    raise RuntimeError("bp::attention is compiled to a kernel and has no eager implementation")


@attention.register_fake
def _shape_only(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


def register_attention() -> str:
    """Makes transformers know the op as an attention implementation; returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention_function)
    AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)
    return _NAME


def _attention_function(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature on top of the custom op."""
    unknown = sorted(
        name
        for name, given in kwargs.items()
        if given is not None and name not in _HARMLESS_ARGUMENTS
    )
    where = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if unknown:
        raise UserError(f"attention of {where} uses {', '.join(unknown)}, which has no kernel yet")
    if attention_mask is not None:
        raise UserError(f"attention of {where} is given a mask of its own, which has no kernel yet")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UserError(f"attention of {where} is not causal; only causal decoders run here")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    result = torch.ops.bp.attention(
        query,
        key,
        value,
        int(module.layer_idx),
        float(scale),
        int(sliding_window or 0),
        float(softcap or 0.0),
    )
    return result, None


#: Keyword arguments that models pass along and that change nothing for one causal token.
_HARMLESS_ARGUMENTS = {
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "layer_idx",
    "position_embeddings",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}
