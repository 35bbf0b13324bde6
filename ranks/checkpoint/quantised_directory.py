"""A model directory that `quantize` wrote: matrices in few bits beside their scales and zeros.

It is a Hugging Face directory whose `quantization.json` names the row format of every quantised
matrix (see `compile.formats.quantised_rows`). Each field of its records is a tensor of the
safetensors files, one row an output (those of a stack of matrices one after the other): `….weight`
the numbers, `….weight_scale` and `….weight_zero`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from buddy_pipeline.compile.formats.quantised_rows import ROW_FORMATS, RowFormat, join_records
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.checkpoint import Quantisation, StoredTensor, TensorInfo
from buddy_pipeline.ranks.checkpoint.json_file import read_json_object
from buddy_pipeline.ranks.checkpoint.safetensors_file import SafetensorsTensor
from buddy_pipeline.ranks.checkpoint.shown import shown

#: What says that a directory is whole and how it was made.
QUANTIZATION = "quantization.json"
#: What says that a conversion is under way, or was when it was interrupted.
PARTIAL = ".quantization.partial.json"
#: `quant_method` of `config.json`, by which other programs see that they cannot read the weights.
METHOD = "buddy-pipeline"
#: Raised whenever records or tensors change their meaning.
FORMAT_VERSION = 2

#: safetensors' names of the types of fields.
FIELD_DTYPES = {"float32": "F32", "float16": "F16", "int8": "I8", "uint8": "U8"}
#: Bytes of records that are turned into float32 at a time.
_PIECE_BYTES = 1 << 20


def field_name(tensor: str, field: str) -> str:
    """The name of the tensor that holds a field of the records of `tensor`."""
    return f"{tensor}_{field}" if field else tensor


@dataclass(frozen=True)
class QuantisedTensor:
    """One matrix, or a stack of them, kept as records of its outputs.

    `info` describes it as Hugging Face has it; where that is [inputs, outputs] it is `transposed`.
    """

    info: TensorInfo
    rows_form: RowFormat
    fields: Mapping[str, SafetensorsTensor]
    transposed: bool

    @property
    def form(self) -> str:
        return self.rows_form.name

    @property
    def is_readable(self) -> bool:
        return True

    def rows(self, start: int, stop: int) -> np.ndarray:
        each = self.info.shape[1] if len(self.info.shape) == 3 else 1
        values = self.outputs(start * each, stop * each)
        return values.reshape(stop - start, *self.info.shape[1:])

    def outputs(self, start: int, stop: int) -> np.ndarray:
        if not self.transposed:
            return self._values(start, stop)
        inputs, outputs = self.info.shape[-2:]
        out = np.empty((stop - start, outputs), np.float32)
        step = max(1, _PIECE_BYTES // inputs)
        for matrix in range(start // inputs, -(-stop // inputs)):
            low, high = max(start - matrix * inputs, 0), min(stop - matrix * inputs, inputs)
            place = out[matrix * inputs + low - start :][: high - low]
            for first in range(0, outputs, step):
                last = min(first + step, outputs)
                values = self._values(matrix * outputs + first, matrix * outputs + last)
                place[:, first:last] = values[:, low:high].T
        return out

    def keeps_outputs(self, transposed: bool) -> bool:
        return False  # records are read by `records`

    def stored_outputs(self, start: int, stop: int) -> np.ndarray:
        raise NotImplementedError

    def records(self, start: int, stop: int) -> np.ndarray:
        return join_records([f.stored_outputs(start, stop) for f in self.fields.values()])

    def _values(self, start: int, stop: int) -> np.ndarray:
        """What records of outputs stand for, float32 [stop - start, inputs]."""
        inputs = self.info.shape[-2 if self.transposed else -1]
        return self.rows_form.dequantise(self.records(start, stop))[:, :inputs]


def is_quantised_here(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a directory that `quantize` wrote."""
    how = config.get("quantization_config")
    return isinstance(how, dict) and how.get("quant_method") == METHOD


def check_complete(path: Path) -> None:
    """Raises UserError for a directory whose conversion was interrupted."""
    if (path / PARTIAL).exists() and not (path / QUANTIZATION).exists():
        raise UserError(
            f"{path} holds a conversion that was interrupted: run the same quantize command again,"
            " which goes on where it stopped"
        )


def open_quantised(
    path: Path, stored: Mapping[str, SafetensorsTensor]
) -> tuple[dict[str, StoredTensor], Quantisation]:
    """The model's tensors, from those of the safetensors files, and how they are quantised.

    Raises UserError for a description or fields that are malformed.
    """
    described = read_json_object(path / QUANTIZATION)
    variant, biased = described.get("variant"), described.get("biased")
    matrices = described.get("tensors")
    if described.get("format") != FORMAT_VERSION:
        raise UserError(
            f"{path / QUANTIZATION} is of format {shown(described.get('format'))}, and this program"
            f" reads format {FORMAT_VERSION}: quantize the original model again"
        )
    if not (isinstance(variant, str) and isinstance(biased, bool) and isinstance(matrices, dict)):
        raise UserError(
            f"{path / QUANTIZATION} lacks variant, biased or tensors; quantize the model again"
        )
    left = dict(stored)
    quantised = {
        name: _quantised_tensor(path, name, entry, left) for name, entry in matrices.items()
    }
    return {**left, **quantised}, Quantisation(variant, biased, quantised)


def _quantised_tensor(
    path: Path, name: str, entry: Any, left: dict[str, SafetensorsTensor]
) -> QuantisedTensor:
    """Takes a matrix's fields out of `left`, each checked against what its format asks for."""
    where = f"{path / QUANTIZATION}: tensor {shown(name)}"
    if not isinstance(entry, dict):
        raise UserError(f"{where} is {shown(entry)}, not an object; quantize the model again")
    form = ROW_FORMATS.get(str(entry.get("form")))
    shape, transposed = _matrix_shape(entry.get("shape")), entry.get("transposed")
    if form is None or shape is None or not isinstance(transposed, bool):
        raise UserError(f"{where} has a wrong form, shape or transposed; quantize the model again")
    height, inputs = shape[:-3:-1] if transposed else shape[-2:]
    outputs = prod(shape[:-2]) * height
    try:
        form.check_depth(inputs)
    except ValueError as error:
        raise UserError(f"{where} {error}; quantize the model again") from None
    fields = {}
    for field, (dtype, count) in form.fields(inputs).items():
        wanted = (FIELD_DTYPES[dtype.name], (outputs, count))
        tensor = left.pop(field_name(name, field), None)
        found = None if tensor is None else (tensor.info.dtype, tensor.info.shape)
        if tensor is None or found != wanted:
            raise UserError(
                f"{path}: tensor {shown(field_name(name, field))} is {shown(found)}, but"
                f" {QUANTIZATION} needs {wanted}; quantize the model again"
            )
        fields[field] = tensor
    return QuantisedTensor(TensorInfo(name, shape, form.name), form, fields, transposed)


def _matrix_shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a matrix or stack of matrices."""
    if not isinstance(value, list) or len(value) not in (2, 3):
        return None
    is_shape = all(type(n) is int and n > 0 for n in value)
    return tuple(value) if is_shape else None
