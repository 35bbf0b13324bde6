"""Q5_0: 32 codes q of 5 bits and a scale d: w = d · (q - 16)."""

from typing import ClassVar

import numpy as np

from buddy_pipeline.compile.formats.block_column import Column
from buddy_pipeline.compile.formats.block_layout import Fields, half, halves_at, words_of
from buddy_pipeline.compile.formats.blocks import BlockFormat


class Q5_0(BlockFormat):
    """A block of the file: d (f16), fifth bits (32, element 0 lowest), four bits as Q4_0."""

    source: ClassVar[str] = "q5_0"
    file_bytes: ClassVar[int] = 22
    bits: ClassVar[int] = 5
    zero: ClassVar[int] = 16

    def fields(self, blocks: np.ndarray) -> Fields:
        """See `BlockFormat.fields`."""
        words = words_of(codes_of_file(blocks[..., 2:6], blocks[..., 6:]), self.bits)
        return Fields(words[:, :, None], halves_at(blocks, 0))

    def scale(self, fields: Fields) -> np.ndarray:
        """d."""
        return half(fields, 0)[..., None]

    def emit_scale(self, column: Column, run: int) -> str:
        """d."""
        return column.half(0)


def codes_of_file(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Codes uint8 [..., 32] from 4 bytes of fifth bits and 16 bytes with two codes' lower bits."""
    fifth = np.unpackbits(upper, axis=-1, bitorder="little")
    return np.concatenate([lower & 15, lower >> 4], axis=-1) | fifth << 4
