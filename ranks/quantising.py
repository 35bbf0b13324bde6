"""Quantising a checkpoint ahead of time, tensor by tensor, into a directory of shards.

Never more than a piece of a matrix is in memory (a matrix stored as [inputs, outputs], alone or in
a stack: that one).
A shard appears whole or not at all, and `quantization.json` last of all, so that what was
interrupted can neither be taken for a model nor is it lost: the shards that are there are kept.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from buddy_pipeline.compile.cache import write_atomically
from buddy_pipeline.compile.formats import weight_format
from buddy_pipeline.compile.formats.quantised_rows import ROW_FORMATS, RowFormat, split_records
from buddy_pipeline.compile.manifest import Parameter, WeightPart
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import Checkpoint
from buddy_pipeline.ranks.checkpoint.quantised_directory import (
    FIELD_DTYPES,
    FORMAT_VERSION,
    PARTIAL,
    QUANTIZATION,
    field_name,
)
from buddy_pipeline.ranks.checkpoint.safetensors_writer import (
    Entry,
    SafetensorsWriter,
    file_bytes,
    writing_safetensors,
)
from buddy_pipeline.ranks.packing import check_parameters, outputs_reader

#: Bytes of a shard, but for a single tensor that is larger.
SHARD_BYTES = 1 << 30
#: Elements read and quantised at a time.
_PIECE = 1 << 20
_INDEX = "model.safetensors.index.json"
#: Names of files that an interrupted run was writing: those of whole ones, hidden, and a number.
_UNFINISHED = re.compile(r"\..+\.(safetensors|json|jinja)\.[0-9a-f]+")
#: Types that are kept; all others become float32.
_KEPT = {"F32": np.float32, "F16": np.uint16, "BF16": np.uint16}

Progress = Callable[[int], None]
"""Called with the bytes of each piece that is written, or found written already."""


@dataclass(frozen=True)
class _Plain:
    """A tensor that is written as it is, or as float32."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def entries(self) -> list[Entry]:
        return [Entry(self.name, self.dtype, self.shape)]


@dataclass(frozen=True)
class _Matrix:
    """A matrix that is quantised, or a stack of them."""

    name: str
    part: WeightPart
    form: str  # of its rows
    weights: str  # the weight format that takes these rows

    @property
    def rows(self) -> RowFormat:
        return ROW_FORMATS[self.form]

    def entries(self) -> list[Entry]:
        fields = self.rows.fields(self.part.columns).items()
        outputs = self.part.matrices * self.part.rows
        return [
            Entry(field_name(self.name, field), FIELD_DTYPES[dtype.name], (outputs, count))
            for field, (dtype, count) in fields
        ]


_Tensor = _Plain | _Matrix


@dataclass(frozen=True)
class Conversion:
    """What will be written: the tensors of each shard."""

    checkpoint: Checkpoint
    variant: str
    biased: bool
    shards: tuple[tuple[_Tensor, ...], ...]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(_bytes(tensor) for shard in self.shards for tensor in shard)

    @property
    def matrices(self) -> list[_Matrix]:
        """The tensors that are quantised."""
        return [t for shard in self.shards for t in shard if isinstance(t, _Matrix)]

    def shard_name(self, number: int) -> str:
        """The file of a shard."""
        return f"model-{number + 1:05d}-of-{len(self.shards):05d}.safetensors"


def plan_conversion(
    checkpoint: Checkpoint,
    parameters: Iterable[Parameter],
    variant: str,
    biased: bool,
    shard_bytes: int = SHARD_BYTES,
) -> Conversion:
    """Deals the model's parameters out to shards, in the order of use.

    parameters: of the whole model in the variant; each says by its form whether it is quantised.

    Raises UserError for a checkpoint that does not fit them.
    """
    wanted = list(parameters)
    check_parameters(wanted, checkpoint)
    tensors: dict[str, _Tensor] = {}
    for parameter in wanted:
        for part in parameter.parts:
            for tensor in _tensors(checkpoint, parameter, part):
                tensors.setdefault(tensor.name, tensor)
    shards: list[list[_Tensor]] = []
    room = 0
    for tensor in tensors.values():
        if not shards or _bytes(tensor) > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= _bytes(tensor)
    return Conversion(checkpoint, variant, biased, tuple(map(tuple, shards)))


def convert(
    conversion: Conversion,
    folder: Path,
    progress: Progress,
    others: Sequence[Callable[[Path], None]],
) -> None:
    """Writes a conversion to a folder, or the rest of it.

    others: write the files beside the weights, when these are there.

    Raises UserError for a folder that holds something else or cannot be written.
    """
    try:
        _begin(conversion, folder)
        for number, shard in enumerate(conversion.shards):
            path = folder / conversion.shard_name(number)
            if _is_whole(path, shard):
                progress(sum(_bytes(tensor) for tensor in shard))
            else:
                _write_shard(conversion.checkpoint, path, shard, progress)
        for write in others:
            write(folder)
        _write_json(folder / _INDEX, _index(conversion))
        _write_json(folder / QUANTIZATION, _description(conversion))
        (folder / PARTIAL).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"--output {folder} cannot be written: {error.strerror or error}: make room or give"
            " another folder, then run the command again"
        ) from None


def _tensors(checkpoint: Checkpoint, parameter: Parameter, part: WeightPart) -> Iterator[_Tensor]:
    if parameter.layout != "panel_bias":
        info = checkpoint.expect(*part.weight, shape=part.shape)
        source = weight_format(parameter.form).source
        if parameter.layout == "panels" and source in ROW_FORMATS:
            yield _Matrix(info.name, part, source, parameter.form)
        else:
            yield _Plain(info.name, info.shape, info.dtype if info.dtype in _KEPT else "F32")
    elif part.bias:
        info = checkpoint.expect(*part.bias, shape=part.bias_shape)
        yield _Plain(info.name, info.shape, info.dtype if info.dtype in _KEPT else "F32")


def _bytes(tensor: _Tensor) -> int:
    return sum(entry.bytes for entry in tensor.entries())


def _begin(conversion: Conversion, folder: Path) -> None:
    """Makes the folder ours, or checks that what it holds is a part of this conversion."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file: give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / QUANTIZATION).exists():
        raise UserError(f"--output {folder} holds a quantised model already: give another folder")
    mine = json.dumps(_fingerprint(conversion), indent=1)
    partial = folder / PARTIAL
    unfinished = [path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name)]
    if not partial.exists():
        if any(not path.name.startswith(f".{PARTIAL}.") for path in folder.iterdir()):
            raise UserError(f"--output {folder} is not empty: give a new folder")
        write_atomically(partial, mine.encode())
    elif partial.read_text(encoding="utf-8", errors="replace") != mine:
        raise UserError(
            f"--output {folder} holds an interrupted conversion of another model, or to another"
            " variant: remove it or give another folder"
        )
    for path in unfinished:
        path.unlink(missing_ok=True)


def _fingerprint(conversion: Conversion) -> dict[str, Any]:
    """What finished shards depend on."""
    path = conversion.checkpoint.path
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stats = [(file.name, file.stat()) for file in files]
    return {
        **_description(conversion),
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "shards": [[tensor.name for tensor in shard] for shard in conversion.shards],
    }


def _description(conversion: Conversion) -> dict[str, Any]:
    """The content of `quantization.json`."""
    return {
        "format": FORMAT_VERSION,
        "source": conversion.checkpoint.path.name,
        "variant": conversion.variant,
        "biased": conversion.biased,
        "tensors": {
            matrix.name: {
                "form": matrix.form,
                "shape": list(matrix.part.shape),
                "transposed": matrix.part.transposed,
            }
            for matrix in conversion.matrices
        },
    }


def _index(conversion: Conversion) -> dict[str, Any]:
    """The content of the index that Hugging Face's readers want."""
    places = {
        entry.name: conversion.shard_name(number)
        for number, shard in enumerate(conversion.shards)
        for tensor in shard
        for entry in tensor.entries()
    }
    return {"metadata": {"total_size": conversion.bytes}, "weight_map": places}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


def _is_whole(path: Path, shard: Sequence[_Tensor]) -> bool:
    """Whether an earlier run wrote this shard, and no copy of it on the way has cut it short."""
    entries = [entry for tensor in shard for entry in tensor.entries()]
    return path.is_file() and path.stat().st_size == file_bytes(entries)


def _write_shard(
    checkpoint: Checkpoint, path: Path, shard: Sequence[_Tensor], progress: Progress
) -> None:
    entries = [entry for tensor in shard for entry in tensor.entries()]
    with writing_safetensors(path, entries) as writer:
        for tensor in shard:
            if isinstance(tensor, _Matrix):
                _write_matrix(checkpoint, writer, tensor, progress)
            else:
                _write_plain(checkpoint, writer, tensor, progress)


def _write_matrix(
    checkpoint: Checkpoint, writer: SafetensorsWriter, matrix: _Matrix, progress: Progress
) -> None:
    part = matrix.part
    form, step = weight_format(matrix.weights), max(1, _PIECE // part.columns)
    for number in range(part.matrices):
        outputs = outputs_reader(form, part, matrix.name, checkpoint, number)
        for first in range(0, part.rows, step):
            records = outputs(first, min(first + step, part.rows))
            for field, values in split_records(matrix.rows, records).items():
                name = field_name(matrix.name, field)
                writer.write(name, number * part.rows + first, values)
            progress(records.nbytes)


def _write_plain(
    checkpoint: Checkpoint, writer: SafetensorsWriter, tensor: _Plain, progress: Progress
) -> None:
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, _PIECE * rows // max(1, int(np.prod(tensor.shape))))
    kept = checkpoint.tensors[tensor.name].dtype == tensor.dtype and len(tensor.shape) == 2
    kept = kept and checkpoint.keeps_outputs(tensor.name, transposed=False)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        if kept:
            values = checkpoint.stored_outputs(tensor.name, first, last)
        else:
            values = _narrowed(checkpoint.read_rows(tensor.name, first, last), tensor.dtype)
        writer.write(tensor.name, first, values)
        progress(values.nbytes)


def _narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 that was widened from `dtype`, as `dtype` again: no bit is lost."""
    if dtype == "F32":
        return values
    if dtype == "F16":
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)
