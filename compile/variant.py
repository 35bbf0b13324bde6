"""Variants: which number formats a model is compiled in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """The weight format of all packed matrices, and the type of the KV cache."""

    name: str
    weights: str
    cache: str


VARIANTS = {
    v.name: v
    for v in (
        Variant("f32", weights="f32", cache="f32"),
        Variant("bf16", weights="bf16", cache="bf16"),
        Variant("f16", weights="f16", cache="f16"),
    )
}
