"""Q5_1: 32 codes q of 5 bits, a scale d and a minimum m: w = d · q + m."""

from typing import ClassVar

import numpy as np

from buddy_pipeline.compile.formats.block_column import Column
from buddy_pipeline.compile.formats.block_layout import Fields, half, halves_at, words_of
from buddy_pipeline.compile.formats.blocks import BlockFormat
from buddy_pipeline.compile.formats.q5_0 import codes_of_file


class Q5_1(BlockFormat):
    """A block of the file: d, m (f16), fifth bits and four bits as Q5_0."""

    source: ClassVar[str] = "q5_1"
    file_bytes: ClassVar[int] = 24
    bits: ClassVar[int] = 5
    halves: ClassVar[int] = 2
    has_minimum: ClassVar[bool] = True

    def fields(self, blocks: np.ndarray) -> Fields:
        """See `BlockFormat.fields`."""
        words = words_of(codes_of_file(blocks[..., 4:8], blocks[..., 8:]), self.bits)
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
