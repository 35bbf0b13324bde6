"""Weight formats: one small module each, and the table of them by name.

A format says how weights are packed into panels (NumPy), and how a kernel turns a packed panel back
into numbers in registers (MLIR text). Nothing else in the code asks which format it is.
"""

from buddy_pipeline.compile.formats.base import WeightFormat
from buddy_pipeline.compile.formats.bf16 import Bf16
from buddy_pipeline.compile.formats.blocks import ACTIVATION_SUFFIXES, BlockFormat
from buddy_pipeline.compile.formats.f16 import F16
from buddy_pipeline.compile.formats.f32 import F32
from buddy_pipeline.compile.formats.q4_0 import Q4_0
from buddy_pipeline.compile.formats.q4_1 import Q4_1
from buddy_pipeline.compile.formats.q4_k import Q4_K
from buddy_pipeline.compile.formats.q5_0 import Q5_0
from buddy_pipeline.compile.formats.q5_1 import Q5_1
from buddy_pipeline.compile.formats.q5_k import Q5_K
from buddy_pipeline.compile.formats.q6_k import Q6_K
from buddy_pipeline.compile.formats.q8_0 import Q8_0
from buddy_pipeline.compile.formats.quantised_rows import ROW_FORMATS
from buddy_pipeline.compile.formats.w4 import W4
from buddy_pipeline.compile.formats.w8 import W8
from buddy_pipeline.compile.formats.w8a8 import W8A8

#: GGUF's block formats. Each exists three times, on the same packed memory: "q8_0" with activations
#: of 8 bits, "q8_0_a16" with 16, "q8_0_exact" with f32.
_BLOCK_FORMATS: tuple[type[BlockFormat], ...] = (
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
)
_ALL: list[WeightFormat] = [F32(), Bf16(), Bf16(exact=True), F16()]
_ALL += [kind(bits) for kind in _BLOCK_FORMATS for bits in ACTIVATION_SUFFIXES]
_ALL += [W8("w8a32"), W8("w8a16"), W8A8(), W4(32), W4(128)]

FORMATS: dict[str, WeightFormat] = {form.name: form for form in _ALL}


def elements_a_byte(name: str) -> int:
    """Elements of a weight format that share a byte of what is stored; 1 for wide ones too."""
    source = FORMATS[name].source
    return 8 // ROW_FORMATS[source].bits if source in ROW_FORMATS else 1


def gguf_format(kind: str, exact: bool, is_sensitive: bool) -> str:
    """The format that computes on a GGUF type, such as "Q4_K", as it is.

    With `exact` activations stay in f32. Else integer types take them in 8 bits, but in 16 where
    the matrix is sensitive to what its inputs lose, or keeps 8 bits itself, so that less is lost by
    the file than would be by its activations.
    """
    name = kind.lower()
    form = FORMATS.get(name)
    if isinstance(form, BlockFormat):
        bits = 32 if exact else 16 if is_sensitive or form.bits >= 8 else 8
        return name + ACTIVATION_SUFFIXES[bits]
    return f"{name}_exact" if exact and f"{name}_exact" in FORMATS else name


def weight_format(name: str) -> WeightFormat:
    """The format of this name; KeyError for one that does not exist."""
    return FORMATS[name]
