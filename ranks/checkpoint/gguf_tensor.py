"""Reading rows of one GGUF tensor as Hugging Face has them."""

from dataclasses import dataclass
from math import prod

import numpy as np
from gguf.constants import GGML_QUANT_SIZES

from buddy_pipeline.ranks.checkpoint.checkpoint import TensorInfo
from buddy_pipeline.ranks.checkpoint.gguf_architectures import Change
from buddy_pipeline.ranks.checkpoint.gguf_header import GgufTensorEntry
from buddy_pipeline.ranks.checkpoint.gguf_quants import dequantize
from buddy_pipeline.ranks.checkpoint.mapped_file import MappedFile

# Bytes copied at a time where rows are not one after the other in the file.
_GROUP_BYTES = 1 << 20


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor and what the converter did to it; `heads` counts for permuted rows only."""

    info: TensorInfo
    file: MappedFile
    entry: GgufTensorEntry
    change: Change
    heads: int = 0

    @property
    def is_readable(self) -> bool:
        return True  # `open_gguf` refuses files with other types

    def rows(self, start: int, stop: int) -> np.ndarray:
        if len(self.info.shape) == 1:
            return self._vector()[start:stop].copy()
        if self.change is Change.TRANSPOSED:
            return self._columns(start, stop)
        if self.change in (Change.QUERY_ROWS, Change.KEY_ROWS):
            return self._permuted_rows(start, stop)
        if len(self.info.shape) == 3:
            each = self.info.shape[1]
            values = self.outputs(start * each, stop * each)
            return values.reshape(stop - start, *self.info.shape[1:])
        return read_stored(self.file, self.entry, start, stop)

    def outputs(self, start: int, stop: int) -> np.ndarray:
        if len(self.info.shape) == 3:
            return read_stored(self.file, self.entry, start, stop)
        return self.rows(start, stop)

    def keeps_outputs(self, transposed: bool) -> bool:
        return transposed == (self.change is Change.TRANSPOSED)

    def stored_outputs(self, start: int, stop: int) -> np.ndarray:
        stored = _row_bytes_of(self.file, self.entry)
        if self.change in (Change.QUERY_ROWS, Change.KEY_ROWS):
            rows = stored[self._stored_rows(start, stop)]
            self.file.release(self.entry.begin, self.entry.end)
            return rows
        rows = stored[start:stop].copy()
        begin = self.entry.begin
        self.file.release(begin + start * rows.shape[1], begin + stop * rows.shape[1])
        return rows

    def _vector(self) -> np.ndarray:
        """Read a one-dimensional tensor whole: its elements are one row of blocks."""
        values = read_stored(self.file, self.entry)
        if self.change is Change.ADDED_ONE:
            values -= 1
        elif self.change in (Change.QUERY_ROWS, Change.KEY_ROWS):
            values = values[self._stored_rows(0, len(values))]
        return values

    def _permuted_rows(self, start: int, stop: int) -> np.ndarray:
        stored = _row_bytes_of(self.file, self.entry)
        wanted = self._stored_rows(start, stop)
        out = np.empty((stop - start, self.info.shape[1]), np.float32)
        step = max(1, _GROUP_BYTES // stored.shape[1])
        for at in range(0, len(wanted), step):
            dequantize(stored[wanted[at : at + step]], self.entry.type, out[at : at + step])
        self.file.release(self.entry.begin, self.entry.end)
        return out

    def _stored_rows(self, start: int, stop: int) -> np.ndarray:
        """Return where Hugging Face's rows `start` to `stop` are in the file, int64.

        Hugging Face pairs rows i and i + d/2 of a head for rotation; llama.cpp stores the pair as
        neighbours 2i and 2i + 1.
        """
        head_dim = self.info.shape[0] // self.heads
        head, row = np.divmod(np.arange(start, stop), head_dim)
        half, pair = np.divmod(row, head_dim // 2)
        return head * head_dim + 2 * pair + half

    def _columns(self, start: int, stop: int) -> np.ndarray:
        """Read columns of the stored matrix as rows, dequantising only the blocks they are in."""
        block_elements, block_bytes = GGML_QUANT_SIZES[self.entry.type]
        first, last = start // block_elements, -(-stop // block_elements)
        blocks = _row_bytes_of(self.file, self.entry)[:, first * block_bytes : last * block_bytes]
        out = np.empty((stop - start, self.info.shape[1]), np.float32)
        width = (last - first) * block_elements
        skipped = first * block_elements
        step = max(1, _GROUP_BYTES // (width * out.itemsize))
        for at in range(0, len(blocks), step):
            group = np.ascontiguousarray(blocks[at : at + step])
            values = np.empty((len(group), width), np.float32)
            dequantize(group, self.entry.type, values)
            out[:, at : at + step] = values[:, start - skipped : stop - skipped].T
        self.file.release(self.entry.begin, self.entry.end)
        return out


def read_stored(
    file: MappedFile, entry: GgufTensorEntry, start: int = 0, stop: int | None = None
) -> np.ndarray:
    """Read a vector, a matrix or the matrices of a stack as they are stored, in float32.

    Args:
        start, stop: the rows wanted, those of a stack counted through, by default all; a vector is
            read whole.
    """
    stored = _row_bytes_of(file, entry)
    stop = len(stored) if stop is None else stop
    out = np.empty((stop - start, entry.shape[-1]), np.float32)
    dequantize(stored[start:stop], entry.type, out)
    row_bytes = stored.shape[1]
    file.release(entry.begin + start * row_bytes, entry.begin + stop * row_bytes)
    return out if len(entry.shape) > 1 else out[0]


def _row_bytes_of(file: MappedFile, entry: GgufTensorEntry) -> np.ndarray:
    """The tensor's bytes, uint8 [rows, bytes of a row]; a one-dimensional tensor is one row."""
    rows = prod(entry.shape[:-1])
    return file.view(entry.begin, entry.end).reshape(rows, -1)
