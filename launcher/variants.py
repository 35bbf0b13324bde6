"""Looking up the number formats that a user names."""

from buddy_pipeline.compile.variant import CACHE_TYPES, VARIANTS, Variant
from buddy_pipeline.launcher.nearest import nearest
from buddy_pipeline.partition.errors import UserError


def known_variant(name: str) -> Variant:
    """The variant of this name; UserError with the nearest known one if there is none."""
    if name not in VARIANTS:
        raise UserError(f"variant {name!r} is unknown: {nearest(name, VARIANTS)}")
    return VARIANTS[name]


def known_cache_type(name: str) -> str:
    """`name` if the KV cache can be of that type; UserError with those that there are if not."""
    if name not in CACHE_TYPES:
        raise UserError(f"KV cache type {name!r} is unknown: {nearest(name, CACHE_TYPES)}")
    return name


def quantised_variants() -> str:
    """The names of the variants that quantise, in words."""
    return " or ".join(variant.name for variant in VARIANTS.values() if variant.quantised)
