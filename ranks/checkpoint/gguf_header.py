"""Parsing the header of a GGUF file that may be damaged or hostile.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf`
package's reader trusts what it reads; this one checks every count, length, type and offset against
the file's size before using it, and gives one line naming the field or tensor otherwise.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.gguf_cursor import Cursor
from buddy_pipeline.ranks.checkpoint.mapped_file import MappedFile
from buddy_pipeline.ranks.checkpoint.shown import shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"

# From the format description: keys are at most 2^16 - 1 bytes; ggml has at most four dimensions.
_MAX_KEY_BYTES = (1 << 16) - 1
_MAX_DIMS = 4

# The smallest a key-value pair (empty key, one-byte value) and a tensor's entry can be, in bytes.
_MIN_FIELD_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

# ggml counts elements and bytes in signed 64-bit integers.
_MAX_COUNT = (1 << 63) - 1

_SCALARS: dict[GGUFValueType, np.dtype[Any]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("<u1"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True)
class GgufTensorEntry:
    """A tensor as the file describes it.

    `shape` is slowest dimension first, as in NumPy (the file has the reverse); `begin` and `end`
    are byte offsets into the file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    begin: int
    end: int


@dataclass(frozen=True)
class GgufHeader:
    """A checked header: metadata by key, as plain Python values, and tensors by GGUF name."""

    file: MappedFile
    fields: dict[str, Any]
    tensors: dict[str, GgufTensorEntry]

    @property
    def path(self) -> Path:
        return self.file.path


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file, version 2 or 3, little-endian.

    Raises:
        UserError: the file cannot be read, or anything in its header is malformed.
    """
    file = MappedFile(path)
    cursor = Cursor(file)
    if cursor.take(min(len(_MAGIC), file.size), "magic") != _MAGIC:
        raise UserError(f"{path} does not start with GGUF; it is not a GGUF file")
    _check_version(path, cursor.u32("version"))
    tensor_count, field_count = cursor.u64("tensor count"), cursor.u64("metadata count")
    _check_count(cursor, path, "metadata fields", field_count, _MIN_FIELD_BYTES)
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        key, value = _read_field(cursor, path)
        if key in fields:
            raise UserError(f"{path}: metadata key {shown(key)} appears twice; damaged file")
        fields[key] = value
    _check_count(cursor, path, "tensors", tensor_count, _MIN_TENSOR_BYTES)
    entries = [_read_tensor(cursor, path) for _ in range(tensor_count)]
    alignment = _alignment(path, fields)
    data_begin = -(-cursor.position // alignment) * alignment
    return GgufHeader(file, fields, _placed(file, entries, data_begin, alignment))


def _check_version(path: Path, version: int) -> None:
    if version in _VERSIONS:
        return
    if version & 0xFFFF == 0:  # a small number with its bytes swapped
        raise UserError(f"{path} is a big-endian GGUF file; convert it to little-endian")
    raise UserError(
        f"{path} has GGUF version {version}; versions 2 and 3 are read, so convert the model again"
    )


def _check_count(cursor: Cursor, path: Path, what: str, count: int, min_bytes: int) -> None:
    if count * min_bytes > cursor.remaining:
        raise UserError(
            f"{path} claims {count} {what} with {cursor.remaining} bytes left; "
            "truncated or damaged file"
        )


def _read_field(cursor: Cursor, path: Path) -> tuple[str, Any]:
    """Read one metadata key and its value."""
    key_bytes = cursor.u64("length of a metadata key")
    if key_bytes > _MAX_KEY_BYTES:
        raise UserError(
            f"{path}: a metadata key at byte {cursor.position} claims {key_bytes} bytes, "
            f"more than the {_MAX_KEY_BYTES} allowed; damaged file"
        )
    try:
        key = cursor.take(key_bytes, "a metadata key").decode()
    except UnicodeDecodeError:
        raise UserError(
            f"{path}: the metadata key before byte {cursor.position} is not UTF-8; damaged file"
        ) from None
    what = f"metadata {shown(key)}"
    value_type = _value_type(path, what, cursor.u32(f"type of {what}"))
    if value_type is not GGUFValueType.ARRAY:
        if value_type is GGUFValueType.STRING:
            return key, cursor.string(what)
        return key, _read_scalars(cursor, path, what, value_type, 1)[0]
    element_type = _value_type(path, what, cursor.u32(f"element type of {what}"))
    if element_type is GGUFValueType.ARRAY:
        raise UserError(f"{path}: {what} is an array of arrays, which no model needs; damaged file")
    count = cursor.u64(f"length of {what}")
    if element_type is GGUFValueType.STRING:
        return key, cursor.strings(count, what)
    return key, _read_scalars(cursor, path, what, element_type, count)


def _value_type(path: Path, what: str, number: int) -> GGUFValueType:
    try:
        return GGUFValueType(number)
    except ValueError:
        raise UserError(f"{path}: {what} has unknown value type {number}; damaged file") from None


def _read_scalars(
    cursor: Cursor, path: Path, what: str, value_type: GGUFValueType, count: int
) -> list[Any]:
    """Read `count` numbers or booleans as plain Python values."""
    dtype = _SCALARS[value_type]
    values = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)
    if value_type is GGUFValueType.BOOL:
        if (values > 1).any():
            raise UserError(f"{path}: {what} has a boolean that is neither 0 nor 1; damaged file")
        values = values.astype(bool)
    return list(values.tolist())


def _alignment(path: Path, fields: dict[str, Any]) -> int:
    alignment = fields.get(_ALIGNMENT_KEY, GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise UserError(
            f"{path}: {_ALIGNMENT_KEY} is {shown(alignment)}; it must be a power of two"
        )
    return alignment


def _read_tensor(cursor: Cursor, path: Path) -> GgufTensorEntry:
    """Read one tensor's entry; `begin` and `end` count from the start of the data section."""
    name = cursor.string("a tensor name")
    where = f"{path}: tensor {shown(name)}"
    dim_count = cursor.u32(f"dimension count of tensor {shown(name)}")
    if not 1 <= dim_count <= _MAX_DIMS:
        raise UserError(f"{where} has {dim_count} dimensions; it must have 1 to {_MAX_DIMS}")
    dims = [cursor.u64(f"dimensions of tensor {shown(name)}") for _ in range(dim_count)]
    if 0 in dims:
        raise UserError(f"{where} has a zero in its dimensions {dims}; damaged file")
    number = cursor.u32(f"type of tensor {shown(name)}")
    try:
        ggml_type = GGMLQuantizationType(number)
    except ValueError:
        raise UserError(f"{where} has unknown type {number}; damaged or too new a file") from None
    block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    if dims[0] % block_elements:
        raise UserError(
            f"{where} of type {ggml_type.name} has rows of {dims[0]} elements, "
            f"not a multiple of its block size {block_elements}; damaged file"
        )
    # Python integers do not wrap, so the product is exact whatever the file claims.
    size = prod(dims) // block_elements * block_bytes
    if prod(dims) > _MAX_COUNT or size > _MAX_COUNT:
        raise UserError(f"{where} has dimensions {dims}, whose product exceeds 63 bits")
    begin = cursor.u64(f"offset of tensor {shown(name)}")
    return GgufTensorEntry(name, tuple(reversed(dims)), ggml_type, begin, begin + size)


def _placed(
    file: MappedFile, entries: list[GgufTensorEntry], data_begin: int, alignment: int
) -> dict[str, GgufTensorEntry]:
    """Return `entries` by name with offsets into the file, after checking how they lie in it."""
    tensors: dict[str, GgufTensorEntry] = {}
    for entry in entries:
        where = f"{file.path}: tensor {shown(entry.name)}"
        if entry.name in tensors:
            raise UserError(f"{where} appears twice; damaged file")
        if entry.begin % alignment:
            raise UserError(
                f"{where} has offset {entry.begin}, not a multiple of the alignment {alignment}; "
                "damaged file"
            )
        begin, end = data_begin + entry.begin, data_begin + entry.end
        if end > file.size:
            raise UserError(
                f"{where} ends at byte {end} of {file.size}; truncated file, download it again"
            )
        tensors[entry.name] = GgufTensorEntry(entry.name, entry.shape, entry.type, begin, end)
    _check_neighbours(file, list(tensors.values()), alignment)
    return tensors


def _check_neighbours(file: MappedFile, tensors: list[GgufTensorEntry], alignment: int) -> None:
    """Each tensor begins where the one before it ends, padded to the alignment, as llama.cpp checks
    too: a tensor whose type is not that of its data would end elsewhere."""
    ordered = sorted(tensors, key=lambda entry: entry.begin)
    for before, after in pairwise(ordered):
        if after.begin < before.end:
            raise UserError(
                f"{file.path}: tensor {shown(after.name)} overlaps tensor {shown(before.name)}; "
                "damaged file"
            )
        if after.begin - before.end >= alignment:
            raise UserError(
                f"{file.path}: tensor {shown(before.name)} of type {before.type.name} ends "
                f"{after.begin - before.end} bytes before tensor {shown(after.name)}; "
                "wrong type or damaged file"
            )
