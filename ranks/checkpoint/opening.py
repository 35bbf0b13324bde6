"""Choosing the reader for a model path."""

from pathlib import Path
from typing import Any

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.checkpoint import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the model at `path`: a Hugging Face directory or a GGUF file.

    Only headers and JSON files are read; weights stay on disk behind a memory map until
    `Checkpoint.read_rows`. Every header field is checked against the file's size first.

    Raises:
        UserError: the path does not exist, is neither kind of model, or holds something malformed
            or unsupported; the message names the file and the field or tensor.
    """
    _check_kind(path)
    # Imported here so that a rank pays for the reader of its own kind of file only.
    if path.is_dir():
        from buddy_pipeline.ranks.checkpoint.hf_directory import open_hf_directory

        return open_hf_directory(path)
    from buddy_pipeline.ranks.checkpoint.gguf_file import open_gguf

    return open_gguf(path)


def read_config(path: Path) -> dict[str, Any]:
    """Read the configuration of the model at `path`; of a directory, nothing else need be there.

    Raises:
        UserError: as in `open_checkpoint`.
    """
    _check_kind(path)
    if path.is_dir():
        from buddy_pipeline.ranks.checkpoint.hf_directory import read_hf_config

        return read_hf_config(path)
    return open_checkpoint(path).config


def has_weights(path: Path) -> bool:
    """Whether there is more than a configuration at `path`; errors as in `open_checkpoint`."""
    _check_kind(path)
    return not path.is_dir() or any(path.glob("*.safetensors*"))


def _check_kind(path: Path) -> None:
    if not path.exists():
        raise UserError(f"model {path} does not exist; give a model directory or a .gguf file")
    if not path.is_dir() and path.suffix.lower() != ".gguf":
        raise UserError(f"model {path} is not a directory and does not end in .gguf; give either")
