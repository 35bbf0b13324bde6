"""Q4_0: 32 codes q of 4 bits and a scale d: w = d · (q - 8)."""

from typing import ClassVar

import numpy as np

from buddy_pipeline.compile.formats.block_column import Column
from buddy_pipeline.compile.formats.block_layout import Fields, half, halves_at
from buddy_pipeline.compile.formats.blocks import BlockFormat


class Q4_0(BlockFormat):
    """A block of the file: d (f16), 16 bytes: q of element j below, of element j + 16 above."""

    source: ClassVar[str] = "q4_0"
    file_bytes: ClassVar[int] = 18
    bits: ClassVar[int] = 4
    zero: ClassVar[int] = 8

    def fields(self, blocks: np.ndarray) -> Fields:
        """The file's bytes are our words: element j + 16 is four groups further."""
        words = np.ascontiguousarray(blocks[..., 2:]).view(np.uint32)
        return Fields(words[:, :, None], halves_at(blocks, 0))

    def scale(self, fields: Fields) -> np.ndarray:
        """d."""
        return half(fields, 0)[..., None]

    def emit_scale(self, column: Column, run: int) -> str:
        """d."""
        return column.half(0)
