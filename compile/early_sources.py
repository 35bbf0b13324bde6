"""Objects that are known before a model is: the driver, and the linear kernels of a variant."""

from buddy_pipeline.compile.formats import weight_format
from buddy_pipeline.compile.granularity import Sharing
from buddy_pipeline.compile.kernels import linear
from buddy_pipeline.compile.kernels.driver import DRIVER, emit_driver
from buddy_pipeline.compile.source import Source
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.variant import Variant


def driver_source(target: Target) -> Source:
    """The stage's driver."""
    return Source(DRIVER, (DRIVER,), emit_driver(target))


def early_sources(variant: Variant, target: Target, sharing: Sharing) -> list[Source]:
    """What every model in this variant needs, as its plan will have it; the longest to build first.

    Where nodes share nothing that is the driver. Formats of single tensors count where the variant
    names them, as for a GGUF file.
    """
    if sharing is Sharing.WHOLE_GRAPH:
        return [driver_source(target)]
    forms = dict.fromkeys(variant.tensors.values()) or {variant.weights: None}
    kernels = []
    for name in forms:
        form = weight_format(name)
        symbol = linear.linear_name(form)
        kernels.append(Source(symbol, (symbol,), linear.emit_linear(target, form)))
    return [*kernels, driver_source(target)]
