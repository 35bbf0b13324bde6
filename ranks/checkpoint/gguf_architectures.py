"""What each supported GGUF architecture is called in transformers, and how its tensors differ.

The rules are those of llama.cpp's converter (`convert_hf_to_gguf.py` and its `conversion/`), read
backwards.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from gguf import get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES

from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.shown import shown

_SUFFIXES = (".weight", ".bias")
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]*)\.(.+)")


class Change(Enum):
    """What the converter did to a tensor's values, to be undone on reading."""

    NONE = auto()
    QUERY_ROWS = auto()  # each head's rows interleaved for rotary pairs (2i, 2i+1)
    KEY_ROWS = auto()  # the same, with as many heads as there are key-value heads
    ADDED_ONE = auto()  # Gemma scales by 1 + weight, GGUF stores the sum
    TRANSPOSED = auto()  # GPT-2's Conv1D is [in, out], GGUF stores [out, in]


@dataclass(frozen=True)
class Architecture:
    """One GGUF architecture in transformers' words.

    `top` and `block` list the Hugging Face names of all parameters it can have, `{}` standing for
    the layer; which of them exist decides biases and the tied head. `changes` are by the last but
    one part of a name (the module), except for `norms_add_one`, which is for every norm.
    """

    model_type: str
    class_name: str
    top: tuple[str, ...]
    block: tuple[str, ...]
    changes: tuple[tuple[str, Change], ...] = ()
    norms_add_one: bool = False
    rope_factor_tensors: tuple[str, ...] = ()

    def change_of(self, hf_name: str) -> Change:
        """Return what was done to the tensor called `hf_name`."""
        module, kind = hf_name.rsplit(".", 2)[-2:]
        if self.norms_add_one and kind == "weight" and module.endswith("norm"):
            return Change.ADDED_ONE
        change = dict(self.changes).get(module, Change.NONE)
        is_vector = kind == "bias"
        return Change.NONE if change is Change.TRANSPOSED and is_vector else change


def _weights(*modules: str) -> tuple[str, ...]:
    return tuple(module + ".weight" for module in modules)


def _both(*modules: str) -> tuple[str, ...]:
    return tuple(module + suffix for module in modules for suffix in _SUFFIXES)


_TOP = _weights("model.embed_tokens", "model.norm", "lm_head")
_ATTENTION = tuple(f"model.layers.{{}}.self_attn.{p}_proj" for p in "qkvo")
_MLP = tuple(f"model.layers.{{}}.mlp.{p}_proj" for p in ("gate", "up", "down"))
_HEAD_NORMS = _weights(*(f"model.layers.{{}}.self_attn.{p}_norm" for p in "qk"))
_PRE_NORMS = _weights("model.layers.{}.input_layernorm", "model.layers.{}.post_attention_layernorm")
_POST_NORMS = _weights(
    "model.layers.{}.post_attention_layernorm", "model.layers.{}.post_feedforward_layernorm"
)
_SANDWICH_NORMS = _weights(
    "model.layers.{}.input_layernorm", "model.layers.{}.pre_feedforward_layernorm"
)
_EXPERTS = _weights(
    "model.layers.{}.mlp.gate",
    *(f"model.layers.{{}}.mlp.experts.{p}_proj" for p in ("gate", "up", "down")),
)
_LLAMA_BLOCK = _both(*_ATTENTION, *_MLP) + _PRE_NORMS
_PERMUTED = (("q_proj", Change.QUERY_ROWS), ("k_proj", Change.KEY_ROWS))
_GPT2_MODULES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        _TOP,
        _LLAMA_BLOCK + _EXPERTS,  # Mixtral's are llama's with experts
        _PERMUTED,
        rope_factor_tensors=("rope_freqs.weight",),
    ),
    "qwen2": Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        _TOP,
        _both(*_ATTENTION[:3]) + _weights(_ATTENTION[3], *_MLP) + _PRE_NORMS,
    ),
    "qwen3": Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        _TOP,
        _both(*_ATTENTION) + _weights(*_MLP) + _HEAD_NORMS + _PRE_NORMS,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _TOP,
        _both(*_ATTENTION) + _EXPERTS + _HEAD_NORMS + _PRE_NORMS,
    ),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _TOP[:2],  # the head is always tied
        _weights(*_ATTENTION, *_MLP) + _SANDWICH_NORMS + _POST_NORMS,
        norms_add_one=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _TOP,
        _weights(*_ATTENTION, *_MLP) + _HEAD_NORMS + _SANDWICH_NORMS + _POST_NORMS,
        norms_add_one=True,
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        _weights("transformer.wte", "transformer.wpe", "lm_head") + _both("transformer.ln_f"),
        _both(*(f"transformer.h.{{}}.{m}" for m in ("ln_1", "ln_2", *_GPT2_MODULES))),
        tuple((module.split(".")[1], Change.TRANSPOSED) for module in _GPT2_MODULES),
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        _TOP,
        _weights(*_ATTENTION, *_MLP) + _HEAD_NORMS + _POST_NORMS,
    ),
    # Granite is converted by Llama's class, row permutation included.
    "granite": Architecture(
        "granite",
        "GraniteForCausalLM",
        _TOP,
        _LLAMA_BLOCK,
        _PERMUTED,
        rope_factor_tensors=("rope_freqs.weight",),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        (*_TOP, "model.norm.bias"),
        _both(*_ATTENTION, "model.layers.{}.mlp.c_fc", "model.layers.{}.mlp.c_proj")
        + _both(*(name.removesuffix(".weight") for name in _PRE_NORMS)),
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        _TOP,
        _weights(
            "model.layers.{}.self_attn.qkv_proj",
            _ATTENTION[3],
            "model.layers.{}.mlp.gate_up_proj",
            _MLP[2],
        )
        + _PRE_NORMS,
        rope_factor_tensors=("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
}


def hf_names(
    path: Path, architecture: str, layers: int, gguf_names: Iterable[str]
) -> dict[str, str]:
    """Return the Hugging Face name of every parameter, by GGUF name.

    Tensors of rotary factors are left out: they are configuration, not parameters.

    Raises:
        UserError: a tensor is none of the architecture's, or belongs to a layer beyond `layers`.
            Ignoring it would compute something else than the file's author meant.
    """
    spec = ARCHITECTURES[architecture]
    kind = next(k for k, name in MODEL_ARCH_NAMES.items() if name == architecture)
    to_gguf = get_tensor_name_map(kind, 1)
    known = {
        to_gguf.get_name(name.format(0), try_suffixes=_SUFFIXES): name
        for name in (*spec.top, *spec.block)
    }
    names = {}
    for gguf_name in gguf_names:
        if gguf_name in spec.rope_factor_tensors:
            continue
        block = _BLOCK.fullmatch(gguf_name)
        layer = int(block[1]) if block and len(block[1]) < 9 else 0
        hf_name = known.get(f"blk.0.{block[2]}" if block else gguf_name)
        if hf_name is None or layer >= layers:
            raise UserError(
                f"{path}: tensor {shown(gguf_name)} is not one of a {architecture} model with "
                f"{counted(layers, 'layer')} as known here; the file is damaged or of a newer kind"
            )
        names[gguf_name] = hf_name.format(layer)
    return names
