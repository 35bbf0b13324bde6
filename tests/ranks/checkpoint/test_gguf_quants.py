"""Dequantisation equals the `gguf` package's to the bit, whatever the number of rows."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, quants

from buddy_pipeline.ranks.checkpoint.gguf_quants import READABLE_TYPES, dequantize

_KINDS = sorted(READABLE_TYPES, key=lambda kind: kind.name)


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 7, 700])
def test_rows_equal_the_reference(kind: object, rows: int) -> None:
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = 512 // block_elements
    random = np.random.default_rng(rows)
    stored = random.integers(0, 256, (rows, blocks * block_bytes), np.uint8)
    # Random bytes hold infinities and NaNs, whose bits are compared as well.
    out = np.empty((rows, 512), np.float32)
    dequantize(stored, kind, out)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(stored, kind).reshape(rows, 512)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
