"""Turning the rows of a GGUF tensor into float32."""

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

# The types that llama.cpp's common quantisation mixes consist of.
_QUANTIZED = {
    kind: getattr(quants, kind.name)
    for kind in (
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
    )
}

READABLE_TYPES = frozenset(_QUANTIZED) | {
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
}

# Elements dequantised at a time. `gguf.quants.dequantize` takes 16 rows at a time, where NumPy's
# overhead a call costs three times the arithmetic; much larger groups fall out of the cache.
_GROUP_ELEMENTS = 1 << 17


def dequantize(rows: np.ndarray, ggml_type: GGMLQuantizationType, out: np.ndarray) -> None:
    """Write the values of `rows` into `out`.

    Args:
        rows: the bytes as stored, uint8 [n, bytes]; each row a whole number of blocks.
        ggml_type: one of `READABLE_TYPES`.
        out: float32 [n, elements], C-contiguous.
    """
    if ggml_type == GGMLQuantizationType.F32:
        out[:] = rows.view("<f4")
        return
    if ggml_type == GGMLQuantizationType.F16:
        out[:] = rows.view("<f2")
        return
    if ggml_type == GGMLQuantizationType.BF16:
        # A bfloat16 is the upper half of a float32.
        bits = out.view(np.uint32)
        bits[:] = rows.view("<u2")
        bits <<= 16
        return
    _, block_bytes = GGML_QUANT_SIZES[ggml_type]
    kind = _QUANTIZED[ggml_type]
    group = max(1, _GROUP_ELEMENTS // out.shape[1])
    for start in range(0, len(rows), group):
        blocks = np.ascontiguousarray(rows[start : start + group]).reshape(-1, block_bytes)
        values = out[start : start + group]
        # A damaged file's scales may be infinite; the values are then, too, without a warning.
        with np.errstate(invalid="ignore", over="ignore"):
            values[:] = kind.dequantize_blocks(blocks).reshape(values.shape)
