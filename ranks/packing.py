"""Weights in the layouts that kernels read, made from a checkpoint's rows in bounded pieces."""

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from buddy_pipeline.compile.manifest import Parameter, WeightPart
from buddy_pipeline.ranks.checkpoint import Checkpoint
from buddy_pipeline.ranks.memory_blocks import aligned_zeros

#: Elements of a weight that are read and packed at a time: 2 MB of f32, which stay in cache.
_PIECE = 1 << 19


def check_parameters(parameters: Iterable[Parameter], reader: Checkpoint) -> None:
    """Raises UserError naming the first tensor that is missing or has another shape."""
    for parameter in parameters:
        for part in parameter.parts:
            reader.expect(*part.weight, shape=part.shape)
            if part.bias:
                reader.expect(*part.bias, shape=(part.rows,))


def pack_parameters(
    parameters: Iterable[Parameter], reader: Checkpoint, threads: int
) -> Mapping[Parameter, np.ndarray]:
    """Every parameter in its layout, f32, aligned; equal parameters (a tied head) share memory."""
    wanted = list(dict.fromkeys(parameters))
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(wanted, pool.map(lambda p: pack(p, reader), wanted), strict=True))


def pack(parameter: Parameter, reader: Checkpoint) -> np.ndarray:
    """One parameter in its layout.

    "panels": [panels, columns, panel], parts one after the other, missing outputs of a part's last
    panel zero. "panel_bias": [panels · panel]. "plain": the elements as stored, one dimension.
    """
    if parameter.layout == "panels":
        return _pack_panels(parameter, reader)
    if parameter.layout == "panel_bias":
        return _pack_bias(parameter, reader)
    part = parameter.parts[0]
    info = reader.expect(*part.weight, shape=part.shape)
    result = aligned_zeros((math.prod(part.shape),), np.float32)
    result[:] = reader.read(info.name).reshape(-1)
    return result


def _pack_panels(parameter: Parameter, reader: Checkpoint) -> np.ndarray:
    width = parameter.panel
    counts = [-(-part.rows // width) for part in parameter.parts]
    columns = parameter.parts[0].columns
    result = aligned_zeros((sum(counts), columns, width), np.float32)
    start = 0
    for part, count in zip(parameter.parts, counts, strict=True):
        name = reader.expect(*part.weight, shape=part.shape).name
        panels = result[start : start + count]
        if part.transposed:
            _pack_transposed(panels, part, name, reader)
        else:
            _pack_rows(panels, part, name, reader)
        start += count
    return result


def _pack_rows(panels: np.ndarray, part: WeightPart, name: str, reader: Checkpoint) -> None:
    """Packs a weight stored as [outputs, inputs]."""
    width = panels.shape[2]
    piece = max(1, _PIECE // (width * part.columns))
    for first in range(0, len(panels), piece):
        low, high = first * width, min((first + piece) * width, part.rows)
        rows = reader.read_rows(name, low, high)
        whole = len(rows) // width
        packed = rows[: whole * width].reshape(whole, width, part.columns)
        panels[first : first + whole] = packed.transpose(0, 2, 1)
        rest = rows[whole * width :]
        if len(rest):
            panels[first + whole, :, : len(rest)] = rest.T


def _pack_transposed(panels: np.ndarray, part: WeightPart, name: str, reader: Checkpoint) -> None:
    """Packs a weight stored as [inputs, outputs]."""
    width = panels.shape[2]
    whole = part.rows // width
    piece = max(1, _PIECE // part.rows)
    for low in range(0, part.columns, piece):
        rows = reader.read_rows(name, low, min(low + piece, part.columns))
        packed = rows[:, : whole * width].reshape(len(rows), whole, width)
        panels[:whole, low : low + len(rows)] = packed.transpose(1, 0, 2)
        if whole < len(panels):
            panels[whole, low : low + len(rows), : part.rows - whole * width] = rows[
                :, whole * width :
            ]


def _pack_bias(parameter: Parameter, reader: Checkpoint) -> np.ndarray:
    width = parameter.panel
    counts = [-(-part.rows // width) for part in parameter.parts]
    result = aligned_zeros((sum(counts) * width,), np.float32)
    start = 0
    for part, count in zip(parameter.parts, counts, strict=True):
        if part.bias:
            name = reader.expect(*part.bias, shape=(part.rows,)).name
            result[start : start + part.rows] = reader.read_rows(name, 0, part.rows)
        start += count * width
    return result
