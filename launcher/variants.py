"""The number formats a model can be compiled in, in one table."""

from dataclasses import dataclass

from buddy_pipeline.launcher.nearest import nearest
from buddy_pipeline.partition.errors import UserError


@dataclass(frozen=True)
class Variant:
    """One number format of weights and activations, by buddy-mlir's name for it."""

    name: str
    quantised: bool
    """Weights carry scales, which buddy-mlir counts as elements of the model."""
    compiled: bool
    """This program can compile it; the others are known only so that specs can name them."""


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("f32", quantised=False, compiled=True),
        Variant("f16", quantised=False, compiled=True),
        Variant("bf16", quantised=False, compiled=True),
        Variant("w8a32", quantised=True, compiled=False),
        Variant("w8a16", quantised=True, compiled=False),
        Variant("w8a8", quantised=True, compiled=False),
        Variant("w4a16", quantised=True, compiled=False),
    )
}


def known_variant(name: str) -> Variant:
    """The variant of this name; UserError with the nearest known one if there is none."""
    if name not in VARIANTS:
        raise UserError(f"variant {name!r} is unknown: {nearest(name, VARIANTS)}")
    return VARIANTS[name]


def compiled_variant(name: str) -> Variant:
    """The variant of this name; UserError if it is unknown or cannot be compiled yet."""
    variant = known_variant(name)
    if not variant.compiled:
        usable = ", ".join(other.name for other in VARIANTS.values() if other.compiled)
        raise UserError(f"variant {name!r} cannot be compiled yet: use --variant {usable}")
    return variant
