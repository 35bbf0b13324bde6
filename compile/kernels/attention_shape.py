"""What an attention kernel is made for: heads, cache type, and the query rows of its tiles."""

from dataclasses import dataclass, replace

from buddy_pipeline.compile.manifest import KV_SPAN, KvLayer
from buddy_pipeline.compile.target import Target

#: f32 elements from one query row's weights to the next: rows of a power of two would share sets
#: of the first cache.
WEIGHTS_STRIDE = KV_SPAN + 16


@dataclass(frozen=True)
class AttentionShape:
    """What the code of an attention kernel depends on."""

    key: int  # elements of a query or key head
    value: int  # elements of a value head
    group: int  # query heads that share a KV head
    softcap: bool
    cache: str  # type of cached elements: "f32", "bf16", "f16" or "int8"
    sinks: bool = False  # each head has a key that everyone sees and whose value is zero
    slopes: bool = False  # each head's scores fall with the distance of the key (ALiBi)

    @property
    def name(self) -> str:
        """The kernel's symbol."""
        cap = "_cap" if self.softcap else ""
        more = ("_sinks" if self.sinks else "") + ("_slopes" if self.slopes else "")
        return f"bp_attention_{self.cache}_k{self.key}_v{self.value}_g{self.group}{cap}{more}"

    @property
    def widened(self) -> "AttentionShape":
        """The same for a cache of f32."""
        return replace(self, cache="f32")

    def part(self, kind: str, rows: "Rows") -> str:
        """The symbol of a function that reads cached elements for some rows."""
        return f"{kind}_{rows.name}_{self.cache}"

    @property
    def layer(self) -> KvLayer:
        """How one KV head lies in the cache."""
        return KvLayer(1, self.key, self.value, self.cache)

    @property
    def value_stride(self) -> int:
        """Numbers of one cached value row."""
        return self.layer.value_stride

    @property
    def query_stride(self) -> int:
        """f32 elements from one copied query row to the next."""
        return -(-self.key // 16) * 16

    @property
    def element(self) -> str:
        """The MLIR type of cached elements."""
        return "i8" if self.is_int8 else self.cache

    @property
    def is_int8(self) -> bool:
        """Whether cached elements are bytes with scales."""
        return self.cache == "int8"


@dataclass(frozen=True)
class Rows:
    """The queries of one register tile: neighbouring tokens × query heads of one KV head."""

    tokens: int
    heads: int

    @property
    def name(self) -> str:
        """Part of the symbols that depend on it."""
        return f"{self.tokens}x{self.heads}"

    @property
    def count(self) -> int:
        """Query rows in all."""
        return self.tokens * self.heads

    def pairs(self) -> list[tuple[int, int]]:
        """(token, head) of every row, in order."""
        return [(token, head) for token in range(self.tokens) for head in range(self.heads)]


def token_parts(target: Target, shape: AttentionShape) -> list[Rows]:
    """The tiles that one token's heads go through, in order: parts of equal and smaller size."""
    most = _most_rows(target, shape)
    return [Rows(1, min(most, shape.group - start)) for start in range(0, shape.group, most)]


#: Tiles from which on a run widens each span first: that costs what three or four of them gain.
_WIDEN_FROM = 4


@dataclass(frozen=True)
class Run:
    """How runs of neighbouring tokens are computed that are at least `fewest` tiles long: in tiles
    of `rows`, which read a cache as `reads` has it. Where it is of another type, it is widened."""

    rows: Rows
    reads: AttentionShape
    fewest: int

    @property
    def name(self) -> str:
        """The symbol of its function."""
        return f"run_{self.rows.name}_{self.reads.cache}"


def runs_of(target: Target, shape: AttentionShape) -> list[Run]:
    """The runs that a kernel computes together, the longest first, in tiles of as many tokens as
    fit the registers beside f32."""
    wide = shape.widened
    rows = Rows(_most_rows(target, wide) // shape.group, shape.group)
    runs = []
    if rows.tokens and shape != wide:
        runs.append(Run(rows, wide, _WIDEN_FROM))
    if rows.tokens > 1 and rows.count <= _most_rows(target, shape):
        runs.append(Run(rows, shape, 1))
    return runs


def _most_rows(target: Target, shape: AttentionShape) -> int:
    """Query rows whose score vectors fit the registers beside the key vectors, their scales where
    they have any, and one broadcast."""
    vectors = target.panel_vectors
    beside = 2 * vectors if shape.is_int8 else vectors
    return max(1, (target.registers - beside - 1) // vectors)


def state_bytes(target: Target, shape: AttentionShape, rows: int) -> int:
    """Bytes of a partial result: outputs, maximum and sum vectors of each row."""
    return rows * (shape.value_stride + 2 * target.lanes) * 4


def span_scratch_bytes(shape: AttentionShape, rows: int) -> int:
    """Bytes that a span function needs beside its result: queries and weights of each row."""
    return rows * (shape.query_stride + WEIGHTS_STRIDE) * 4


def partial_bytes(target: Target, shape: AttentionShape) -> int:
    """Bytes of one span's partial result of one token and KV head."""
    return sum(state_bytes(target, shape, rows.heads) for rows in token_parts(target, shape))
