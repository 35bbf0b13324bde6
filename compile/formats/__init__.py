"""Weight formats: one small module each, and the table of them by name.

A format says how weights are packed into panels (NumPy), and how a kernel turns a packed panel back
into numbers in registers (MLIR text). Nothing else in the code asks which format it is.
"""

from buddy_pipeline.compile.formats.base import WeightFormat
from buddy_pipeline.compile.formats.bf16 import Bf16
from buddy_pipeline.compile.formats.blocks import BlockFormat
from buddy_pipeline.compile.formats.f16 import F16
from buddy_pipeline.compile.formats.f32 import F32
from buddy_pipeline.compile.formats.q4_0 import Q4_0
from buddy_pipeline.compile.formats.q4_1 import Q4_1
from buddy_pipeline.compile.formats.q8_0 import Q8_0
from buddy_pipeline.compile.formats.quantised_rows import ROW_FORMATS
from buddy_pipeline.compile.formats.w4 import W4
from buddy_pipeline.compile.formats.w8 import W8
from buddy_pipeline.compile.formats.w8a8 import W8A8

#: GGUF's block formats. Each exists twice: "q8_0_exact" reads the same packed memory and keeps
#: activations in f32.
_BLOCK_FORMATS: tuple[type[BlockFormat], ...] = (Q4_0, Q4_1, Q8_0)
_ALL: list[WeightFormat] = [F32(), Bf16(), Bf16(exact=True), F16()]
_ALL += [kind(exact) for kind in _BLOCK_FORMATS for exact in (False, True)]
_ALL += [W8("w8a32"), W8("w8a16"), W8A8(), W4(32), W4(128)]

FORMATS: dict[str, WeightFormat] = {form.name: form for form in _ALL}


def elements_a_byte(name: str) -> int:
    """Elements of a weight format that share a byte of what is stored; 1 for wide ones too."""
    source = FORMATS[name].source
    return 8 // ROW_FORMATS[source].bits if source in ROW_FORMATS else 1


def weight_format(name: str) -> WeightFormat:
    """The format of this name; KeyError for one that does not exist."""
    return FORMATS[name]
