"""Q4_1: 32 codes q of 4 bits, a scale d and a minimum m: w = d · q + m."""

from typing import ClassVar

import numpy as np

from buddy_pipeline.compile.formats.block_column import Column
from buddy_pipeline.compile.formats.block_layout import Fields, half, halves_at
from buddy_pipeline.compile.formats.blocks import BlockFormat


class Q4_1(BlockFormat):
    """A block of the file: d, m (f16), 16 bytes: q of element j below, of element j + 16 above."""

    source: ClassVar[str] = "q4_1"
    file_bytes: ClassVar[int] = 20
    bits: ClassVar[int] = 4
    halves: ClassVar[int] = 2
    has_minimum: ClassVar[bool] = True

    def fields(self, blocks: np.ndarray) -> Fields:
        """The file's bytes are our words: element j + 16 is four groups further."""
        words = np.ascontiguousarray(blocks[..., 4:]).view(np.uint32)
        return Fields(words[:, :, None], halves_at(blocks, 0, 2))

    def scale(self, fields: Fields) -> np.ndarray:
        """d."""
        return half(fields, 0)[..., None]

    def minimum(self, fields: Fields) -> np.ndarray:
        """m."""
        return half(fields, 1)

    def emit_scale(self, column: Column, run: int) -> str:
        """d."""
        return column.half(0)

    def emit_minimum(self, column: Column) -> str:
        """m."""
        return column.half(1)
