"""Q4_K: 8 blocks of 32 codes q of 4 bits, each with a scale s and a minimum m of 6 bits, and two
numbers d and e for all: w = (d · s) · q - e · m."""

from typing import ClassVar

import numpy as np

from buddy_pipeline.compile.formats.block_column import Column
from buddy_pipeline.compile.formats.block_layout import BLOCK, Fields, half, halves_at, words_of
from buddy_pipeline.compile.formats.blocks import BlockFormat


class Q4_K(BlockFormat):
    """A block of the file: d, e (f16), s and m of 8 blocks (12 bytes), 128 bytes of codes.

    32 bytes hold two blocks: the codes of the first below, of the second above. We give each block
    words of its own, and its s and m a byte each.
    """

    source: ClassVar[str] = "q4_k"
    file_bytes: ClassVar[int] = 144
    blocks: ClassVar[int] = 8
    bits: ClassVar[int] = 4
    scales: ClassVar[int] = 2
    halves: ClassVar[int] = 2
    has_minimum: ClassVar[bool] = True

    def fields(self, blocks: np.ndarray) -> Fields:
        """See `BlockFormat.fields`."""
        words = words_of(paired_codes(blocks[..., 16:]), self.bits)
        return Fields(words, halves_at(blocks, 0, 2), scales_of_file(blocks[..., 4:16]))

    def scale(self, fields: Fields) -> np.ndarray:
        """d · s."""
        assert fields.scales is not None
        return (half(fields, 0) * fields.scales[..., 0])[..., None]

    def minimum(self, fields: Fields) -> np.ndarray:
        """-e · m."""
        assert fields.scales is not None
        return -(half(fields, 1) * fields.scales[..., 1])

    def emit_scale(self, column: Column, run: int) -> str:
        """d · s."""
        f = column.types.of("f32")
        return column.t.binary("arith.mulf", column.half(0), column.scale(0, signed=False), f)

    def emit_minimum(self, column: Column) -> str:
        """-e · m."""
        t, f = column.t, column.types.of("f32")
        product = t.binary("arith.mulf", column.half(1), column.scale(1, signed=False), f)
        return t.op(f"arith.negf {product} : {f}")


def paired_codes(stored: np.ndarray) -> np.ndarray:
    """Codes uint8 [..., 8, 32] from 128 bytes in which two blocks share 32."""
    pairs = stored.reshape(*stored.shape[:-1], 4, 1, BLOCK)
    both = np.concatenate([pairs & 15, pairs >> 4], axis=-2)
    return both.reshape(*stored.shape[:-1], 8, BLOCK)


def scales_of_file(stored: np.ndarray) -> np.ndarray:
    """s and m of 8 blocks, uint8 [..., 8, 2], from 12 bytes.

    Bytes 0 to 3 hold s of the first four blocks, 4 to 7 their m, 8 to 11 the lower bits of the
    other four's s (below) and m (above), whose upper two bits lie above s and m of the first four.
    """
    first, least, rest = (stored[..., i : i + 4] for i in (0, 4, 8))
    s = np.concatenate([first & 63, (rest & 15) | (first >> 2 & 48)], axis=-1)
    m = np.concatenate([least & 63, (rest >> 4) | (least >> 2 & 48)], axis=-1)
    return np.stack([s, m], axis=-1)
