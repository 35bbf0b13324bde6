"""Weights in the layouts that kernels read, made from a checkpoint's rows in bounded pieces."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from buddy_pipeline.compile.formats import weight_format
from buddy_pipeline.compile.formats.base import WeightFormat, panel_bytes
from buddy_pipeline.compile.formats.quantised_rows import ROW_FORMATS
from buddy_pipeline.compile.manifest import Parameter, WeightPart
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import Checkpoint
from buddy_pipeline.ranks.memory_blocks import ALIGNMENT, arena

#: Elements of a weight that are read and packed at a time: 2 MB of f32, which stay in cache.
_PIECE = 1 << 19
#: NumPy's types of numbers that are packed as stored.
_STORED = {"f32": np.float32, "bf16": np.uint16, "f16": np.float16}


def check_parameters(parameters: Iterable[Parameter], checkpoint: Checkpoint) -> None:
    """Raises UserError naming the first tensor that is missing, or has another shape or type."""
    for parameter in parameters:
        for part in parameter.parts:
            checkpoint.expect(*part.weight, shape=part.shape)
            if part.bias:
                checkpoint.expect(*part.bias, shape=part.bias_shape)


def pack_parameters(
    parameters: Iterable[Parameter], checkpoint: Checkpoint, threads: int
) -> Mapping[Parameter, np.ndarray]:
    """Every parameter in its layout; equal parameters (a tied head) share memory.

    They lie one after the other in the order given, the order of use, so that a step streams
    through memory.
    """
    wanted = list(dict.fromkeys(parameters))
    sizes = [-(-packed_bytes(p) // ALIGNMENT) * ALIGNMENT for p in wanted]
    memory = arena(sum(sizes))
    starts = np.cumsum([0, *sizes])
    places = [
        memory[start : start + packed_bytes(p)] for p, start in zip(wanted, starts, strict=False)
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda p, place: pack(p, checkpoint, place), wanted, places))
    return dict(zip(wanted, places, strict=True))


def packed_bytes(parameter: Parameter) -> int:
    """Bytes of a parameter in its layout."""
    if parameter.layout == "plain":
        return 4 * math.prod(parameter.parts[0].shape)
    panels = sum(_panel_counts(parameter))
    if parameter.layout == "panel_bias":
        return 4 * panels * parameter.panel
    form = weight_format(parameter.form)
    return panels * panel_bytes(form, parameter.parts[0].columns, parameter.panel)


def pack(parameter: Parameter, checkpoint: Checkpoint, place: np.ndarray) -> None:
    """Writes one parameter in its layout to `place`, uint8 [packed_bytes], which holds zeros.

    "panels": [panels, panel bytes], missing outputs of a matrix's last panel zero. "panel_bias":
    float32 [panels · panel]. "plain": the elements as stored, float32.
    """
    if parameter.layout == "panels":
        _pack_panels(parameter, checkpoint, place)
    elif parameter.layout == "panel_bias":
        _pack_bias(parameter, checkpoint, place)
    else:
        part = parameter.parts[0]
        info = checkpoint.expect(*part.weight, shape=part.shape)
        place.view(np.float32)[:] = checkpoint.read(info.name).reshape(-1)


def _panel_counts(parameter: Parameter) -> list[int]:
    """Panels of each matrix."""
    return [-(-part.rows // parameter.panel) for part, _ in _matrices(parameter)]


def _in_order(parameter: Parameter, panels: np.ndarray) -> np.ndarray:
    """A view [turns, panels of a turn, …] in which matrices lie one after the other."""
    turns = parameter.turns
    return panels.reshape(len(panels) // turns, turns, -1).swapaxes(0, 1)


def _matrices(parameter: Parameter) -> Iterator[tuple[WeightPart, int]]:
    """The matrices of all parts: (part, which of its stack)."""
    for part in parameter.parts:
        for matrix in range(part.matrices):
            yield part, matrix


def _pack_panels(parameter: Parameter, checkpoint: Checkpoint, place: np.ndarray) -> None:
    form, start = weight_format(parameter.form), 0
    counts = _panel_counts(parameter)
    panels = _in_order(parameter, place.reshape(sum(counts), -1))
    for (part, matrix), count in zip(_matrices(parameter), counts, strict=True):
        name = checkpoint.expect(*part.weight, shape=part.shape).name
        outputs = outputs_reader(form, part, name, checkpoint, matrix)
        most = max(1, _PIECE // (parameter.panel * part.columns))
        for first, wanted in _pieces(panels, start, count, most):
            low = first * parameter.panel
            high = min(low + len(wanted) * parameter.panel, part.rows)
            _pack_piece(form, outputs(low, high), wanted)
        start += count


def _pieces(
    panels: np.ndarray, start: int, count: int, most: int
) -> Iterator[tuple[int, np.ndarray]]:
    """The panels [turn, panel, …] of a matrix, up to `most` at a time: the first one's number and
    those of one turn."""
    first = 0
    while first < count:
        turn, place = divmod(start + first, panels.shape[1])
        piece = panels[turn, place : place + min(most, count - first)]
        yield first, piece
        first += len(piece)


def _pack_piece(form: WeightFormat, rows: np.ndarray, panels: np.ndarray) -> None:
    """Packs rows into panels that may have others between them."""
    if panels.flags.c_contiguous:
        form.pack(rows, panels)
    else:
        together = np.zeros(panels.shape, panels.dtype)
        form.pack(rows, together)
        panels[:] = together


def outputs_reader(
    form: WeightFormat, part: WeightPart, name: str, checkpoint: Checkpoint, matrix: int = 0
) -> Callable[[int, int], np.ndarray]:
    """A function that reads outputs `low` to `high` of a matrix as the format packs them: as the
    checkpoint keeps them where it can, else by way of f32. `matrix` is which of a stack."""
    before = matrix * part.rows  # outputs of the stack
    if form.source in ROW_FORMATS and checkpoint.has_records(name, form.source):
        return lambda low, high: checkpoint.records(name, before + low, before + high)
    is_kept = checkpoint.tensors[name].dtype == form.source.upper()
    if is_kept and checkpoint.keeps_outputs(name, part.transposed):
        kind = _STORED.get(form.source, np.uint8)
        return lambda low, high: checkpoint.stored_outputs(name, before + low, before + high).view(
            kind
        )
    if not part.transposed:
        return lambda low, high: _converted(
            form, checkpoint.read_outputs(name, before + low, before + high), name
        )
    # A weight stored as [inputs, outputs] has no rows to read piece by piece: all of it is read.
    if part.is_stack:
        whole = checkpoint.read_rows(name, matrix, matrix + 1)[0].T
    else:
        whole = checkpoint.read(name).T
    return lambda low, high: _converted(form, np.ascontiguousarray(whole[low:high]), name)


def _converted(form: WeightFormat, rows: np.ndarray, name: str) -> np.ndarray:
    """float32 rows as a weight format packs them."""
    try:
        return form.from_f32(rows)
    except ValueError as error:
        raise UserError(f"tensor '{name}' {error}") from None


def _pack_bias(parameter: Parameter, checkpoint: Checkpoint, place: np.ndarray) -> None:
    counts, start = _panel_counts(parameter), 0
    values = np.zeros(sum(counts) * parameter.panel, np.float32)
    for (part, matrix), count in zip(_matrices(parameter), counts, strict=True):
        if part.bias:
            name = checkpoint.expect(*part.bias, shape=part.bias_shape).name
            bias = checkpoint.read(name).reshape(part.matrices, part.rows)[matrix]
            values[start : start + part.rows] = bias
        start += count * parameter.panel
    panels = _in_order(parameter, place.view(np.float32).reshape(sum(counts), -1))
    panels[:] = values.reshape(panels.shape)
