"""Weight formats: one small module each, and the table of them by name.

A format says how weights are packed into panels (NumPy), and how a kernel turns a packed panel back
into numbers in registers (MLIR text). Nothing else in the code asks which format it is.
"""

from buddy_pipeline.compile.formats.base import WeightFormat
from buddy_pipeline.compile.formats.bf16 import Bf16
from buddy_pipeline.compile.formats.f16 import F16
from buddy_pipeline.compile.formats.f32 import F32

FORMATS: dict[str, WeightFormat] = {f.name: f for f in (F32(), Bf16(), F16())}


def weight_format(name: str) -> WeightFormat:
    """The format of this name; KeyError for one that does not exist."""
    return FORMATS[name]
