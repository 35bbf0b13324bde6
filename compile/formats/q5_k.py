"""Q5_K: Q4_K with codes of 5 bits."""

from typing import ClassVar

import numpy as np

from buddy_pipeline.compile.formats.block_layout import Fields, halves_at, words_of
from buddy_pipeline.compile.formats.q4_k import Q4_K, paired_codes, scales_of_file


class Q5_K(Q4_K):
    """A block of the file: as Q4_K, with 32 bytes before the codes: bit b of byte j is the fifth of
    element j of block b."""

    source: ClassVar[str] = "q5_k"
    file_bytes: ClassVar[int] = 176
    bits: ClassVar[int] = 5

    def fields(self, blocks: np.ndarray) -> Fields:
        """See `BlockFormat.fields`."""
        shifts = np.arange(8, dtype=np.uint8)[:, None]
        fifth = (blocks[..., None, 16:48] >> shifts & 1) << 4
        words = words_of(paired_codes(blocks[..., 48:]) | fifth, self.bits)
        return Fields(words, halves_at(blocks, 0, 2), scales_of_file(blocks[..., 4:16]))
