"""Opening a GGUF file as a checkpoint with Hugging Face's names, shapes and values."""

from pathlib import Path
from typing import Any

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.checkpoint import Checkpoint, TensorInfo
from buddy_pipeline.ranks.checkpoint.expert_stack import is_stack, join_stacks
from buddy_pipeline.ranks.checkpoint.gguf_architectures import ARCHITECTURES, Change, hf_names
from buddy_pipeline.ranks.checkpoint.gguf_config import hf_config
from buddy_pipeline.ranks.checkpoint.gguf_header import (
    GgufHeader,
    GgufTensorEntry,
    read_gguf_header,
)
from buddy_pipeline.ranks.checkpoint.gguf_quants import READABLE_TYPES
from buddy_pipeline.ranks.checkpoint.gguf_tensor import GgufTensor, read_stored
from buddy_pipeline.ranks.checkpoint.gguf_tokenizer import gguf_tokenizer_source
from buddy_pipeline.ranks.checkpoint.shown import shown


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of one of the architectures in `ARCHITECTURES`.

    Raises:
        UserError: the file is malformed, is one part of several, or is of an architecture or
            holds a tensor type that is not supported.
    """
    header = read_gguf_header(path)
    architecture = _architecture(header)
    spec = ARCHITECTURES[architecture]
    for entry in header.tensors.values():
        _check_type(header, entry)
    factors = {
        name: read_stored(header.file, header.tensors[name])
        for name in spec.rope_factor_tensors
        if name in header.tensors
    }
    config = hf_config(header, architecture, factors)
    layers = config["n_layer" if architecture == "gpt2" else "num_hidden_layers"]
    names = hf_names(path, architecture, layers, header.tensors)
    stored = {
        hf_name: _tensor(header, config, hf_name, header.tensors[name], spec.change_of(hf_name))
        for name, hf_name in names.items()
    }
    return Checkpoint(path, config, join_stacks(path, stored), gguf_tokenizer_source(header))


def _architecture(header: GgufHeader) -> str:
    architecture = header.fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UserError(
            f"{header.path} has architecture {shown(architecture)}; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    parts = header.fields.get("split.count", 1)
    if type(parts) is int and parts > 1:
        raise UserError(
            f"{header.path} is one of {parts} parts; join them with llama-gguf-split --merge"
        )
    return architecture


def _check_type(header: GgufHeader, entry: GgufTensorEntry) -> None:
    if entry.type not in READABLE_TYPES:
        supported = ", ".join(sorted(kind.name for kind in READABLE_TYPES))
        raise UserError(
            f"{header.path}: tensor {shown(entry.name)} has type {entry.type.name}; "
            f"supported are {supported}"
        )


def _tensor(
    header: GgufHeader,
    config: dict[str, Any],
    hf_name: str,
    entry: GgufTensorEntry,
    change: Change,
) -> GgufTensor:
    """Describe a tensor as Hugging Face has it, checking that its change can be undone."""
    needed = (2,) if change is Change.TRANSPOSED else (3,) if is_stack(hf_name) else (1, 2)
    if len(entry.shape) not in needed:
        raise UserError(
            f"{header.path}: tensor {shown(entry.name)} has {len(entry.shape)} dimensions; "
            f"it must have {' or '.join(map(str, needed))}"
        )
    shape = entry.shape[::-1] if change is Change.TRANSPOSED else entry.shape
    heads = 0
    if change in (Change.QUERY_ROWS, Change.KEY_ROWS):
        heads = config[
            "num_attention_heads" if change is Change.QUERY_ROWS else "num_key_value_heads"
        ]
        if shape[0] % (2 * heads):
            raise UserError(
                f"{header.path}: tensor {shown(entry.name)} has {shape[0]} rows, "
                f"not an even number for each of {heads} heads; damaged file"
            )
    info = TensorInfo(hf_name, shape, entry.type.name)
    return GgufTensor(info, header.file, entry, change, heads)
