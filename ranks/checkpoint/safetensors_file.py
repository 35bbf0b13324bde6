"""Reading a safetensors file whose header is checked before anything trusts it.

The format: eight bytes of header length (little-endian), that many bytes of JSON, then the data,
which the tensors cover without hole or overlap. See
https://huggingface.co/docs/safetensors/index#format.
"""

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.checkpoint import TensorInfo
from buddy_pipeline.ranks.checkpoint.mapped_file import MappedFile
from buddy_pipeline.ranks.checkpoint.shown import shown

_LENGTH_BYTES = 8

# The limit of the reference implementation; a larger header is an attack or damage.
_MAX_HEADER_BYTES = 100_000_000

# More than any model's tensors have; keeps the product of dimensions cheap to form.
_MAX_DIMS = 8

_DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

# bfloat16 is read as its bits, which are the upper half of a float32's.
_NUMPY_DTYPES = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}

# Elements converted at a time, so that temporaries stay in a core's cache.
_CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class SafetensorsTensor:
    """One tensor of a safetensors file; `begin` and `end` are byte offsets into the file."""

    info: TensorInfo
    file: MappedFile
    begin: int
    end: int

    @property
    def is_readable(self) -> bool:
        return self.info.dtype in _NUMPY_DTYPES

    def keeps_outputs(self, transposed: bool) -> bool:
        return not transposed

    def stored_outputs(self, start: int, stop: int) -> np.ndarray:
        begin, end = self._range(start, stop, self.info.shape[-1:])
        rows = self.file.view(begin, end).reshape(stop - start, -1).copy()
        self.file.release(begin, end)
        return rows

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self._read(start, stop, self.info.shape[1:])

    def outputs(self, start: int, stop: int) -> np.ndarray:
        return self._read(start, stop, self.info.shape[-1:])

    def _range(self, start: int, stop: int, shape: tuple[int, ...]) -> tuple[int, int]:
        """The bytes of the file that hold these parts, each of `shape`."""
        part_bytes = prod(shape) * _DTYPE_BYTES[self.info.dtype]
        return self.begin + start * part_bytes, self.begin + stop * part_bytes

    def _read(self, start: int, stop: int, shape: tuple[int, ...]) -> np.ndarray:
        """Parts of `shape` in float32, [stop - start, *shape]."""
        begin, end = self._range(start, stop, shape)
        stored = self.file.view(begin, end).view(_NUMPY_DTYPES[self.info.dtype])
        out = np.empty((stop - start, *shape), np.float32)
        flat = out.reshape(-1)
        if self.info.dtype == "BF16":
            bits = flat.view(np.uint32)
            for at in range(0, len(stored), _CHUNK_ELEMENTS):
                chunk = bits[at : at + _CHUNK_ELEMENTS]
                chunk[:] = stored[at : at + _CHUNK_ELEMENTS]
                chunk <<= 16
        else:
            flat[:] = stored
        self.file.release(begin, end)
        return out


def open_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    """Return the tensors of a safetensors file by name, in the order of the header.

    Raises:
        UserError: the file cannot be read or its header is malformed in any way; the message names
            the file and the tensor.
    """
    file = MappedFile(path)
    header, data_begin = _header(file)
    data_bytes = file.size - data_begin
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info, begin, end = _checked_entry(path, name, entry, data_bytes)
        tensors[name] = SafetensorsTensor(info, file, data_begin + begin, data_begin + end)
    _check_coverage(path, list(tensors.values()), data_begin, file.size)
    return tensors


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    """Return the parsed header and the offset of the data behind it."""
    path = file.path
    if file.size < _LENGTH_BYTES:
        raise UserError(f"{path} is {file.size} bytes long, too short for safetensors; truncated?")
    length = int.from_bytes(file.buffer[:_LENGTH_BYTES], "little")
    if length > _MAX_HEADER_BYTES or length > file.size - _LENGTH_BYTES:
        raise UserError(
            f"{path} claims a safetensors header of {length} bytes in a file of {file.size}; "
            "truncated or not safetensors"
        )
    data_begin = _LENGTH_BYTES + length
    try:
        header = json.loads(
            file.buffer[_LENGTH_BYTES:data_begin], object_pairs_hook=_without_duplicates
        )
    except _DuplicateName as error:
        raise UserError(f"{path}: safetensors header names {error} twice; damaged file") from None
    except (ValueError, RecursionError) as error:
        # RecursionError: brackets nested deeper than any real header's.
        raise UserError(
            f"{path}: safetensors header is not JSON ({shown(str(error))}); damaged file"
        ) from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: safetensors header is not a JSON object; damaged file")
    return header, data_begin


class _DuplicateName(Exception):
    """A JSON object with the same name twice."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise _DuplicateName(shown(Counter(name for name, _ in pairs).most_common(1)[0][0]))
    return names


def _checked_entry(
    path: Path, name: str, entry: Any, data_bytes: int
) -> tuple[TensorInfo, int, int]:
    """Check one tensor's entry by itself; return it with its byte range in the data."""
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise UserError(f"{where} lacks dtype, shape or data_offsets; damaged safetensors header")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise UserError(
            f"{where} has unknown type {shown(dtype)}; known are {', '.join(_DTYPE_BYTES)}"
        )
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise UserError(
            f"{where} has shape {shown(shape)}; it must be at most {_MAX_DIMS} numbers >= 0"
        )
    if not _are_counts(offsets) or len(offsets) != 2:
        raise UserError(f"{where} has data_offsets {shown(offsets)}; it must be two numbers >= 0")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise UserError(
            f"{where} lies at bytes {begin}:{end} of {data_bytes} bytes of data; truncated file"
        )
    needed = prod(shape) * _DTYPE_BYTES[dtype]
    if needed != end - begin:
        raise UserError(
            f"{where} of type {dtype} and shape {shape} needs {needed} bytes, "
            f"but data_offsets give it {end - begin}; damaged safetensors header"
        )
    return TensorInfo(name, tuple(shape), dtype), begin, end


def _are_counts(value: Any) -> bool:
    """Whether `value` is a list of non-negative integers that fit 63 bits (true is not one)."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_coverage(
    path: Path, tensors: list[SafetensorsTensor], data_begin: int, data_end: int
) -> None:
    """Check that the tensors tile the data exactly, as the format demands."""
    position = data_begin
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != position:
            fault = "overlaps another tensor" if tensor.begin < position else "follows a hole"
            name = shown(tensor.info.name)
            raise UserError(f"{path}: tensor {name} {fault} at byte {tensor.begin}; damaged file")
        position = tensor.end
    if position != data_end:
        raise UserError(
            f"{path}: {data_end - position} bytes behind the last tensor belong to none; "
            "damaged safetensors header"
        )
