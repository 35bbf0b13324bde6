"""Q8_0: 32 int8 q and a scale d: w = d · q."""

from typing import ClassVar

import numpy as np

from buddy_pipeline.compile.formats.block_column import Column
from buddy_pipeline.compile.formats.block_layout import Fields, half, halves_at
from buddy_pipeline.compile.formats.blocks import BlockFormat
from buddy_pipeline.compile.formats.quantised_rows import Int8Blocks


class Q8_0(BlockFormat):
    """A block of the file: d (f16), q (32 int8)."""

    source: ClassVar[str] = "q8_0"
    file_bytes: ClassVar[int] = 34
    bits: ClassVar[int] = 8
    signed: ClassVar[bool] = True

    def from_f32(self, rows: np.ndarray) -> np.ndarray:
        """Quantised rows."""
        return Int8Blocks().quantise(rows)

    def fields(self, blocks: np.ndarray) -> Fields:
        """See `BlockFormat.fields`."""
        words = np.ascontiguousarray(blocks[..., 2:]).view(np.uint32)
        return Fields(words[:, :, None], halves_at(blocks, 0))

    def scale(self, fields: Fields) -> np.ndarray:
        """d."""
        return half(fields, 0)[..., None]

    def emit_scale(self, column: Column, run: int) -> str:
        """d."""
        return column.half(0)
