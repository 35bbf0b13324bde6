"""Weights in the layouts that kernels read, made from a checkpoint's rows in bounded pieces."""

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from buddy_pipeline.compile.formats import weight_format
from buddy_pipeline.compile.formats.base import WeightFormat, panel_bytes
from buddy_pipeline.compile.manifest import Parameter, WeightPart
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import Checkpoint
from buddy_pipeline.ranks.memory_blocks import aligned_zeros

#: Elements of a weight that are read and packed at a time: 2 MB of f32, which stay in cache.
_PIECE = 1 << 19


def check_parameters(parameters: Iterable[Parameter], checkpoint: Checkpoint) -> None:
    """Raises UserError naming the first tensor that is missing, or has another shape or type."""
    for parameter in parameters:
        for part in parameter.parts:
            checkpoint.expect(*part.weight, shape=part.shape)
            if part.bias:
                checkpoint.expect(*part.bias, shape=(part.rows,))


def pack_parameters(
    parameters: Iterable[Parameter], checkpoint: Checkpoint, threads: int
) -> Mapping[Parameter, np.ndarray]:
    """Every parameter in its layout, aligned; equal parameters (a tied head) share memory."""
    wanted = list(dict.fromkeys(parameters))
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(wanted, pool.map(lambda p: pack(p, checkpoint), wanted), strict=True))


def pack(parameter: Parameter, checkpoint: Checkpoint) -> np.ndarray:
    """One parameter in its layout.

    "panels": uint8 [panels, panel bytes], parts one after the other, missing outputs of a part's
    last panel zero. "panel_bias": float32 [panels · panel]. "plain": the elements as stored,
    float32, one dimension.
    """
    if parameter.layout == "panels":
        return _pack_panels(parameter, checkpoint)
    if parameter.layout == "panel_bias":
        return _pack_bias(parameter, checkpoint)
    part = parameter.parts[0]
    info = checkpoint.expect(*part.weight, shape=part.shape)
    result = aligned_zeros((math.prod(part.shape),), np.float32)
    result[:] = checkpoint.read(info.name).reshape(-1)
    return result


def _pack_panels(parameter: Parameter, checkpoint: Checkpoint) -> np.ndarray:
    form, width = weight_format(parameter.form), parameter.panel
    counts = [-(-part.rows // width) for part in parameter.parts]
    size = panel_bytes(form, parameter.parts[0].columns, width)
    result = aligned_zeros((sum(counts), size), np.uint8)
    start = 0
    for part, count in zip(parameter.parts, counts, strict=True):
        name = checkpoint.expect(*part.weight, shape=part.shape).name
        _pack_part(result[start : start + count], part, name, form, width, checkpoint)
        start += count
    return result


def _pack_part(
    panels: np.ndarray,
    part: WeightPart,
    name: str,
    form: WeightFormat,
    width: int,
    checkpoint: Checkpoint,
) -> None:
    """Packs one matrix, some panels at a time."""
    # A weight stored as [inputs, outputs] has no rows to read piece by piece: all of it is read.
    whole = checkpoint.read(name).T if part.transposed else None
    piece = max(1, _PIECE // (width * part.columns))
    for first in range(0, len(panels), piece):
        low, high = first * width, min((first + piece) * width, part.rows)
        if whole is None:
            rows = _rows_as(form.source, name, low, high, checkpoint)
        else:
            rows = _converted(form.source, np.ascontiguousarray(whole[low:high]), name)
        form.pack(rows, panels[first : first + -(-len(rows) // width)])


def _rows_as(dtype: str, name: str, low: int, high: int, checkpoint: Checkpoint) -> np.ndarray:
    """Rows in the type that a weight format packs; as stored where that is the type already."""
    if checkpoint.tensors[name].dtype == dtype.upper() and dtype != "f32":
        stored = checkpoint.stored_rows(name, low, high)
        if stored is not None:
            return stored.view(np.float16 if dtype == "f16" else np.uint16)
    return _converted(dtype, checkpoint.read_rows(name, low, high), name)


def _converted(dtype: str, rows: np.ndarray, name: str) -> np.ndarray:
    """float32 rows rounded to the nearest number of `dtype`, ties to even."""
    if dtype == "f32":
        return rows
    if dtype == "f16":
        with np.errstate(over="ignore"):
            halves = rows.astype(np.float16)
        if np.isinf(halves).any() and np.isfinite(rows).all():
            raise UserError(
                f"tensor '{name}' has values beyond the range of f16: use --variant bf16"
            )
        return halves
    bits = rows.view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + odd) >> 16).astype(np.uint16)


def _pack_bias(parameter: Parameter, checkpoint: Checkpoint) -> np.ndarray:
    width = parameter.panel
    counts = [-(-part.rows // width) for part in parameter.parts]
    result = aligned_zeros((sum(counts) * width,), np.float32)
    start = 0
    for part, count in zip(parameter.parts, counts, strict=True):
        if part.bias:
            name = checkpoint.expect(*part.bias, shape=(part.rows,)).name
            result[start : start + part.rows] = checkpoint.read_rows(name, 0, part.rows)
        start += count * width
    return result
