"""The attention op: what transformers' classes call while they are exported, in place of attention.

A function registered with transformers hands every layer's query, key and value to one custom op,
so a graph holds attention as one node. A registered mask function makes no mask, but says what one
would let a token see.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from buddy_pipeline.partition.errors import UserError

_NAME = "buddy_pipeline"
ATTENTION_ARGUMENTS = ("query", "key", "value", "sinks", "slopes", "scale", "window", "softcap")
"""The op's, in order."""


@torch.library.custom_op("bp::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Causal attention of one layer: query [1, heads, 1, key], key [1, kv heads, 1, key], value
    [1, kv heads, 1, value] to [1, 1, heads, value].

    sinks: [heads], scores of a key that everyone sees and whose value is zero.
    slopes: [heads], what a score falls by for each position that its key is away (ALiBi).

    Only traced, never run.
    """
    raise RuntimeError("bp::attention is compiled to a kernel and has no eager implementation")


@attention.register_fake
def _shape_only(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    slopes: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


def attention_of(model_class: Any) -> str:
    """The attention implementation to build a transformers class with: the op, or what the class
    writes out itself where it has no choice (see `written_attention`)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention_function)
    AttentionMaskInterface.register(_NAME, _mask_function)
    return _NAME if model_class._can_set_attn_implementation() else "eager"


@contextlib.contextmanager
def plain_masks() -> Iterator[None]:
    """Classes that write attention out get a mask that hides nothing: a token has one key."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS["eager"] = _open_mask
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["eager"]


def _open_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    """transformers' mask signature: zeros [1, 1, 1, 1]."""
    if _mask_function(*args, **kwargs) != CausalMask(0):
        raise UserError("its attention has a window, or is not causal, which has no kernel yet")
    return torch.zeros(1, 1, 1, 1, dtype=dtype, device=kwargs.get("device"))


@dataclass(frozen=True)
class CausalMask:
    """What a model hands around as a mask."""

    window: int
    """Positions that a token sees, itself included; 0 for all."""

    def __getitem__(self, part: Any) -> "CausalMask":
        """Classes cut masks to the length of the keys."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the class computes with its mask ({name}), which has no kernel yet")


def _mask_function(
    *args: Any,
    mask_function: Callable[..., Any] | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> CausalMask | None:
    """transformers' mask signature: None for a mask that is not causal; raises UserError for one
    that is, but neither plain nor with a window."""
    parts = _parts_of(mask_function)
    if any("bidirectional" in name for name in parts):
        return None
    if use_vmap:
        raise UserError("its attention mask is of the model's own making, which has no kernel yet")
    if "chunked_overlay" in parts:
        raise UserError("its attention is cut into chunks of the sequence, which has no kernel yet")
    return CausalMask(local_size or 0)


def _parts_of(function: Callable[..., Any] | None) -> set[str]:
    """The functions that made a mask function and those it combines, by name: transformers builds
    masks as closures."""
    if function is None:
        return set()
    names = {function.__qualname__.split(".")[0]}
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for part in held if isinstance(held, (list, tuple)) else [held]:
            if callable(part) and hasattr(part, "__qualname__"):
                names |= _parts_of(part)
    return names


def _attention_function(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: CausalMask | torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature on top of the custom op.

    The mask decides what a token sees, as in transformers' eager attention.
    """
    unknown = sorted(
        name
        for name, given in kwargs.items()
        if given is not None and name not in _HARMLESS_ARGUMENTS and not name.startswith("output_")
    )
    where = f"attention of {type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    if unknown:
        raise UserError(f"{where} uses {', '.join(unknown)}, which has no kernel yet")
    if attention_mask is None:
        raise UserError(f"{where} has no causal mask; only causal decoders run here")
    if not isinstance(attention_mask, CausalMask):
        raise UserError(f"{where} is given a mask of its own, which has no kernel yet")
    if key.shape[2] != 1:
        raise UserError(f"{where} has keys that are not its token's, which has no kernel yet")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    result = torch.ops.bp.attention(
        query,
        key,
        value,
        s_aux,
        None,
        float(scale),
        attention_mask.window,
        float(softcap or 0.0),
    )
    return result, None


#: Keyword arguments that models pass along and that change nothing for one causal token.
_HARMLESS_ARGUMENTS = {
    "dropout",
    "is_causal",  # the mask decides
    "sliding_window",  # the mask has it where it counts
    "position_ids",
    "cache_position",
    "use_cache",
    "return_dict",
    "layer_idx",
    "position_embeddings",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}
