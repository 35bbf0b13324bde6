#!/usr/bin/env python3
"""Writes a checkpoint with random weights in the shape of a published model.

A Hugging Face directory (config.json, model.safetensors, a tokenizer of one token a byte) and a
spec for it, so that the command line and the benchmarks run it; with --gguf also a GGUF file of the
same weights. It computes as much as the real model and says nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import typer

from benchkit.byte_tokenizer import write_tokenizer_files
from benchkit.command import main
from benchkit.gguf_export import check_quantisation, export_gguf
from benchkit.published import SHAPES, published_config, tensor_shapes
from benchkit.random_weights import DTYPES, file_size, write_random_weights
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import open_checkpoint

#: Positions in the spec: enough for every benchmark, few enough for a small cache.
_CONTEXT = 4096
_TORCH_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def make_checkpoint(
    shape: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.")],
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bf16",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Fewer layers than the model has.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal files.")] = 0,
    gguf: Annotated[
        list[str] | None,
        typer.Option(help="Also write model-FORMAT.gguf, such as Q8_0; may be repeated."),
    ] = None,
) -> None:
    """Writes a random checkpoint with the shape of a published model, and a spec for it."""
    config = published_config(shape) | {"torch_dtype": _TORCH_NAMES[_known_dtype(dtype)]}
    for quantisation in gguf or ():
        check_quantisation(quantisation)
    if layers is not None:
        config["num_hidden_layers"] = layers
    tensors = list(tensor_shapes(config))
    _make_folder(folder, file_size(tensors, dtype))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_tokenizer_files(folder, config)
    spec = {
        "hf_model_path": str(folder.absolute()),
        "model_family": config["model_type"],
        "variant": "f32",
        "max_token_len": _CONTEXT,
    }
    (folder / "spec.json").write_text(json.dumps(spec, indent=2) + "\n")
    write_random_weights(folder / "model.safetensors", tensors, dtype, seed)
    checkpoint = open_checkpoint(folder)
    print(f"{folder}: {checkpoint.element_count():,} parameters, {dtype}; run it with")
    print(f'  buddy-pipeline --spec {folder / "spec.json"} --prompt "…"')
    for quantisation in gguf or ():
        path = folder / f"model-{quantisation}.gguf"
        export_gguf(checkpoint, path, quantisation)
        print(f"{path}: {path.stat().st_size:,} bytes")


def _known_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} is not known: use one of {', '.join(DTYPES)}")
    return dtype


def _make_folder(folder: Path, size: int) -> None:
    """Makes the folder; UserError if something is in it or the disk has no room for `size`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: give a new folder")
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}): give a new folder") from None
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UserError(
            f"{folder}: the weights take {size:,} bytes, the disk has {free:,} free: "
            "take a smaller --dtype or shape"
        )


if __name__ == "__main__":
    main(make_checkpoint)
