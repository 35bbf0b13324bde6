"""The variant `gguf`: every matrix in the number format that its file has it in."""

from dataclasses import replace

from buddy_pipeline.compile.formats import gguf_format
from buddy_pipeline.compile.variant import GGUF, Variant
from buddy_pipeline.launcher.module_roles import (
    ATTENTION_INPUTS,
    HEADS,
    TOKEN_TABLES,
    module_of,
)
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import Checkpoint

#: Modules whose inputs are kept in 16 bits; a table may be the head's matrix too.
_SENSITIVE = HEADS | TOKEN_TABLES | ATTENTION_INPUTS


def as_stored(variant: Variant, checkpoint: Checkpoint, exact: bool) -> Variant:
    """The variant with the formats of a GGUF file's tensors, if it is the one that wants them.

    exact: activations and KV cache stay in f32. Else activations are integers (see `gguf_format`).

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
        name: gguf_format(info.dtype, exact, module_of(name) in _SENSITIVE)
        for name, info in checkpoint.tensors.items()
    }
    return replace(variant, tensors=tensors, cache="f32" if exact else variant.cache)
