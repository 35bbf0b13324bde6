"""Variants: which number formats a model is compiled in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: The variant whose formats are those that a GGUF file's tensors have.
GGUF = "gguf"
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
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Formats of single matrices by their tensors' names, which go before all of the above."""

    @property
    def quantised(self) -> bool:
        """Whether some matrices are in fewer bits than the others."""
        return self.weights != self.rest

    def linear(self, names: Iterable[str], has_bias: bool) -> str:
        """The weight format of a linear whose weight has one of these names."""
        return self._own(names) or (self.rest if has_bias and not self.biased else self.weights)

    def table(self, names: Iterable[str]) -> str:
        """The weight format of an embedding table that is nobody's weight besides."""
        return self._own(names) or self.rest

    def _own(self, names: Iterable[str]) -> str | None:
        return next((self.tensors[name] for name in names if name in self.tensors), None)


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
        # What a file lacks is missed when weights are read.
        Variant(GGUF, weights="f32", rest="f32", cache="f16"),
    )
}
