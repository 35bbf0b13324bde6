"""Variants: which number formats a model is compiled in."""

from dataclasses import dataclass

#: Types that the KV cache can be kept in.
CACHE_TYPES = ("f32", "bf16", "f16", "int8")


@dataclass(frozen=True)
class Variant:
    """Number formats by what they are for; names of weights' formats as in `formats`."""

    name: str
    weights: str
    """Of linears, and of an embedding table that is also the head's weight."""
    rest: str
    """Of other embedding tables, and of linears that stay unquantised."""
    cache: str
    """Of the KV cache, one of `CACHE_TYPES`."""
    biased: bool = True
    """Whether linears with a bias are in `weights` too, not in `rest`."""

    @property
    def quantised(self) -> bool:
        """Whether some matrices are in fewer bits than the others."""
        return self.weights != self.rest

    def linear(self, has_bias: bool) -> str:
        """The weight format of a linear."""
        return self.rest if has_bias and not self.biased else self.weights


VARIANTS = {
    v.name: v
    for v in (
        Variant("f32", weights="f32", rest="f32", cache="f32"),
        Variant("bf16", weights="bf16", rest="bf16", cache="bf16"),
        Variant("f16", weights="f16", rest="f16", cache="f16"),
        Variant("w8a32", weights="w8a32", rest="f32", cache="f32"),
        Variant("w8a16", weights="w8a16", rest="bf16", cache="bf16"),
        Variant("w8a8", weights="w8a8", rest="bf16", cache="bf16"),
        Variant("w4a16", weights="w4g32", rest="bf16", cache="bf16"),
        Variant("w4a16-g128", weights="w4g128", rest="bf16", cache="bf16"),
    )
}
