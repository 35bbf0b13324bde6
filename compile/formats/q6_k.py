"""Q6_K: 16 runs of 16 codes q of 6 bits, each with a scale s of 8 bits, and a number d for all:
w = (d · s) · (q - 32)."""

from typing import ClassVar

import numpy as np

from buddy_pipeline.compile.formats.block_column import Column
from buddy_pipeline.compile.formats.block_layout import BLOCK, Fields, half, halves_at, words_of
from buddy_pipeline.compile.formats.blocks import BlockFormat


class Q6_K(BlockFormat):
    """A block of the file: 128 bytes of lower bits, 64 of upper bits, s (16 int8), d (f16).

    Of each half of the file's block, four blocks of 32: 64 bytes hold their lower bits, of the
    first two below and of the others above; 32 bytes their upper bits, two for each.
    """

    source: ClassVar[str] = "q6_k"
    file_bytes: ClassVar[int] = 210
    blocks: ClassVar[int] = 8
    bits: ClassVar[int] = 6
    zero: ClassVar[int] = 32
    runs: ClassVar[int] = 2
    scales: ClassVar[int] = 2

    def fields(self, blocks: np.ndarray) -> Fields:
        """See `BlockFormat.fields`."""
        shape = blocks.shape[:-1]
        lower = blocks[..., :128].reshape(*shape, 2, 2, BLOCK)
        lower = np.concatenate([lower & 15, lower >> 4], axis=-2).reshape(*shape, 8, BLOCK)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        upper = blocks[..., 128:192].reshape(*shape, 2, 1, BLOCK) >> shifts & 3
        codes = lower | upper.reshape(*shape, 8, BLOCK) << 4
        scales = blocks[..., 192:208].reshape(*shape, 8, 2)
        return Fields(words_of(codes, self.bits, self.runs), halves_at(blocks, 208), scales)

    def scale(self, fields: Fields) -> np.ndarray:
        """d · s."""
        assert fields.scales is not None
        return half(fields, 0)[..., None] * fields.scales.view(np.int8)

    def emit_scale(self, column: Column, run: int) -> str:
        """d · s."""
        f = column.types.of("f32")
        return column.t.binary("arith.mulf", column.half(0), column.scale(run, signed=True), f)
