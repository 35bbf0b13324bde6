"""A draft: what a template does, item by item, on words of its args table."""

import hashlib
from dataclasses import dataclass, field

from buddy_pipeline.compile.kernels.attention_shape import AttentionShape
from buddy_pipeline.compile.manifest import KvLayer


@dataclass(frozen=True)
class Row:
    """Where a value's rows lie: a word of the args table, a column offset and a row stride, both in
    elements of `dtype`."""

    word: int
    column: int
    stride: int
    dtype: str

    @property
    def element(self) -> str:
        """The MLIR type of one element."""
        return "i64" if self.dtype == "i64" else "f32"


@dataclass(frozen=True)
class Gather:
    """Copies the rows whose logits are wanted to a dense temporary."""

    source: Row
    to: Row


@dataclass(frozen=True)
class Linear:
    """out = x · Wᵀ (+ bias) for one or several packed matrices side by side.

    With an epilogue, panels of several parts take `turns`, and rows of its inputs that lie in `out`
    begin with the first panel of a part.
    """

    x: Row
    out: Row
    weight: int
    bias: int | None
    depth: int
    panels: int
    form: str
    turns: int = 1
    epilogue: "IslandCall | None" = None


@dataclass(frozen=True)
class ExpertLinear:
    """out[j] = x · Wᵀ (+ bias) with the matrix of each expert that a token chose.

    `step` is the distance of the rows of x that belong to a token's choices, 0 where all choices
    read the same row.
    """

    x: Row
    choice: Row
    out: Row
    weight: int
    bias: int | None
    step: int
    choices: int
    experts: int
    depth: int
    outputs: int
    form: str


@dataclass(frozen=True)
class TopK:
    """out = where the `count` greatest of each of `rows` rows of x lie."""

    x: Row
    out: Row
    rows: int
    width: int
    count: int


@dataclass(frozen=True)
class Attention:
    """Causal attention over the cache; `kv` is the word of its KV offset, `sinks` and `slopes`
    those of what each head has of its own."""

    q: Row
    k: Row
    v: Row
    out: Row
    shape: AttentionShape
    kv_heads: int
    kv: int
    scale: float
    window: int
    softcap: float
    sinks: int | None = None
    slopes: int | None = None


@dataclass(frozen=True)
class Embedding:
    """out = table[ids]."""

    ids: Row
    out: Row
    table: int
    depth: int
    form: str


@dataclass(frozen=True)
class IslandCall:
    """An island on each token: arguments are rows (activations) or words (whole arrays)."""

    source: int  # which of the draft's islands
    inputs: tuple[Row | int, ...]
    outputs: tuple[Row, ...]


Item = Gather | Linear | ExpertLinear | TopK | Attention | Embedding | IslandCall


@dataclass
class Draft:
    """A template before it is written: what it does, on words of its args table.

    Two partitions with equal `signature()` share a template.
    """

    counts: str = "tokens"  # or "rows": which tokens it works on
    items: list[Item] = field(default_factory=list)
    islands: list[str] = field(default_factory=list)  # structural signatures
    scratch: list[int] = field(default_factory=list)  # row bytes
    kv: list[KvLayer] = field(default_factory=list)

    def signature(self) -> str:
        """Text that is equal for templates of equal code."""
        return repr((self.counts, self.items, self.islands, self.scratch))

    def name(self) -> str:
        """A symbol that follows from the structure."""
        return "template_" + hashlib.sha256(self.signature().encode()).hexdigest()[:12]
