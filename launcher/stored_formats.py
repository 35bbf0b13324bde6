"""The variant `gguf`: every matrix in the number format that its file has it in."""

from dataclasses import replace

from buddy_pipeline.compile.formats import gguf_format
from buddy_pipeline.compile.variant import GGUF, Variant
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import Checkpoint

#: Modules of the head, which a table may be, and of the attention's inputs, by their names in
#: transformers' classes.
_SENSITIVE = frozenset(
    {"lm_head", "embed_tokens", "wte"}
    | {"q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value"}
)


def as_stored(variant: Variant, checkpoint: Checkpoint, exact: bool) -> Variant:
    """The variant with the formats of a GGUF file's tensors, if it is the one that wants them.

    exact: activations and KV cache stay in f32. Else activations are 8-bit blocks, but for the head
    and the attention's inputs, which rounding harms most: of the 0.51 % of perplexity that 8-bit
    activations cost SmolLM2-135M (Q4_1) half goes with these, and they are few: the head is asked
    for one row of a prompt, and the inputs are a sixth of a layer.

    Raises UserError for a checkpoint that is no GGUF file, and for `exact` with another variant.
    """
    if variant.name != GGUF:
        if exact:
            raise UserError(
                f"--exact keeps activations of the variant {GGUF} in f32, and this is "
                f"{variant.name}: add --variant {GGUF}, or leave --exact out"
            )
        return variant
    if checkpoint.path.is_dir():
        raise UserError(
            f"variant {GGUF} computes on a GGUF file's own formats, and {checkpoint.path} is a "
            "directory: give a .gguf file with --local-model, or another --variant"
        )
    tensors = {
        name: gguf_format(info.dtype, exact or _module(name) in _SENSITIVE)
        for name, info in checkpoint.tensors.items()
    }
    return replace(variant, tensors=tensors, cache="f32" if exact else variant.cache)


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight").rpartition(".")[2]
