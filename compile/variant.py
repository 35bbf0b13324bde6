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
    """Of linears."""
    table_and_head: str
    """Of an embedding table that is also the head's weight. Rows of few bits and one scale are too
    coarse for it: int8 rows cost SmolLM2-135M 0.30 % of perplexity there, and 0.08 % elsewhere."""
    rest: str
    """Of other embedding tables, of routers, and of linears that stay unquantised."""
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

    def linear(self, names: Iterable[str], has_bias: bool, is_table: bool) -> str:
        """The weight format of a linear whose weight has one of these names, and which may be an
        embedding table besides."""
        own = self._own(names)
        if own is not None:
            return own
        if is_table:
            return self.table_and_head
        return self.rest if has_bias and not self.biased else self.weights

    def router(self, names: Iterable[str]) -> str:
        """The weight format of a linear that chooses experts: few numbers, on which much hangs."""
        return self._own(names) or self.rest

    def table(self, names: Iterable[str]) -> str:
        """The weight format of an embedding table that is nobody's weight besides."""
        return self._own(names) or self.rest

    def _own(self, names: Iterable[str]) -> str | None:
        return next((self.tensors[name] for name in names if name in self.tensors), None)


VARIANTS = {
    v.name: v
    for v in (
        # name, weights, table_and_head, rest, cache
        Variant("f32", "f32", "f32", "f32", "f32"),
        Variant("bf16", "bf16", "bf16", "bf16", "bf16"),
        Variant("f16", "f16", "f16", "f16", "f16"),
        Variant("w8a32", "w8a32", "q8_0_exact", "f32", "f32"),
        Variant("w8a16", "w8a16", "q8_0_a16", "bf16", "bf16"),
        Variant("w8a8", "w8a8", "q8_0_a16", "bf16", "bf16"),
        Variant("w4a16", "w4g32", "q8_0_a16", "bf16", "bf16"),
        Variant("w4a16-g128", "w4g128", "q8_0_a16", "bf16", "bf16"),
        # What a file lacks is missed when weights are read.
        Variant(GGUF, "f32", "f32", "f32", "f16"),
    )
}
