"""Templates: one partition's fragments written as one function that a team of threads runs.

A template is `name(args, step, tid)`: `args` is a table of 8-byte words (addresses of activations,
parameters and temporaries, and KV offsets), so layers of one structure share the code.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from buddy_pipeline.compile.formats import weight_format
from buddy_pipeline.compile.formats.base import panel_bytes
from buddy_pipeline.compile.kernels import attention, embedding, experts, linear, top_k
from buddy_pipeline.compile.kernels.attention_shape import AttentionShape, partial_bytes
from buddy_pipeline.compile.kernels.step import (
    declare_end_region,
    end_region,
    step_word,
    thread_share,
)
from buddy_pipeline.compile.manifest import KvLayer, Parameter, StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


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
    """out = x · Wᵀ (+ bias) for one or several packed matrices side by side."""

    x: Row
    out: Row
    weight: int
    bias: int | None
    depth: int
    panels: int
    form: str


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
    parameters: list[Parameter] = field(default_factory=list)

    def signature(self) -> str:
        """Text that is equal for templates of equal code."""
        return repr((self.counts, self.items, self.islands, self.scratch))

    def name(self) -> str:
        """A symbol that follows from the structure."""
        return "template_" + hashlib.sha256(self.signature().encode()).hexdigest()[:12]

    def thread_scratch(self, target: Target) -> int:
        """Bytes that one thread needs while it runs the template."""
        needs = [0]
        for item in self.items:
            if isinstance(item, Linear):
                needs.append(
                    linear.linear_scratch_bytes(target, weight_format(item.form), item.depth)
                )
            elif isinstance(item, ExpertLinear):
                form = weight_format(item.form)
                needs.append(experts.experts_scratch_bytes(target, form, item.depth))
            elif isinstance(item, Attention):
                needs.append(attention.attention_scratch_bytes(target, item.shape))
        return max(needs)

    def partial(self, target: Target) -> int:
        """Bytes of one partial result of its attention."""
        shapes = [item.shape for item in self.items if isinstance(item, Attention)]
        return max((partial_bytes(target, shape) for shape in shapes), default=0)

    def libraries(self, target: Target) -> dict[str, Callable[[], str]]:
        """The kernel libraries that the template calls: symbol and emitter."""
        found: dict[str, Callable[[], str]] = {}
        for item in self.items:
            if isinstance(item, Linear):
                form = weight_format(item.form)
                found[linear.linear_name(form)] = partial(linear.emit_linear, target, form)
            elif isinstance(item, ExpertLinear):
                form = weight_format(item.form)
                found[linear.linear_name(form)] = partial(linear.emit_linear, target, form)
                found[experts.experts_name(form)] = partial(experts.emit_experts, target, form)
            elif isinstance(item, TopK):
                found[top_k.TOP_K] = top_k.emit_top_k
            elif isinstance(item, Attention):
                found[item.shape.name] = partial(attention.emit_attention, target, item.shape)
            elif isinstance(item, Embedding):
                form = weight_format(item.form)
                name = embedding.embedding_name(form)
                found[name] = partial(embedding.emit_embedding, target, form)
        return found


def island_symbol(template: str, index: int) -> str:
    """The symbol of a template's island."""
    return f"{template}_island{index}"


def emit_template(draft: Draft, name: str, target: Target) -> str:
    """MLIR text of the module with the template as function `name`, without islands' bodies."""
    t = Text()
    declare_end_region(t)
    _declare(t, draft, name)
    args = [("args", "!llvm.ptr"), ("step", "!llvm.ptr"), ("tid", "i64")]
    with t.function(name, args):
        team = step_word(t, StepWord.TEAM)
        count = step_word(t, StepWord.ROWS if draft.counts == "rows" else StepWord.TOKENS)
        writer = _Writer(t, name, team, count, target)
        for number, item in enumerate(draft.items):
            t.line(f"// {number}: {type(item).__name__}")
            writer.write(item)
            end_region(t)
        t.line("return")
    return str(t)


def _declare(t: Text, draft: Draft, name: str) -> None:
    """Declarations of the kernels and islands that the template calls."""
    signatures: dict[str, list[str]] = {}
    for item in draft.items:
        if isinstance(item, Linear):
            name_of = linear.linear_name(weight_format(item.form))
            signatures[name_of] = [kind for _, kind in linear.SIGNATURE]
        elif isinstance(item, ExpertLinear):
            name_of = experts.experts_name(weight_format(item.form))
            signatures[name_of] = [kind for _, kind in experts.SIGNATURE]
        elif isinstance(item, TopK):
            signatures[top_k.TOP_K] = [kind for _, kind in top_k.SIGNATURE]
        elif isinstance(item, Attention):
            signatures[item.shape.name] = [kind for _, kind in attention.SIGNATURE]
        elif isinstance(item, Embedding):
            name_of = embedding.embedding_name(weight_format(item.form))
            signatures[name_of] = [kind for _, kind in embedding.SIGNATURE]
        elif isinstance(item, IslandCall):
            count = len(item.inputs) + len(item.outputs)
            signatures[island_symbol(name, item.source)] = ["!llvm.ptr"] * count
    for symbol, kinds in signatures.items():
        t.line(f"func.func private @{symbol}({', '.join(kinds)})")


class _Writer:
    """Writes the items of one template."""

    def __init__(self, t: Text, name: str, team: str, count: str, target: Target) -> None:
        self.t = t
        self.name = name
        self.team = team
        self.count = count
        self.target = target

    def write(self, item: Item) -> None:
        """Writes one item as calls and loops."""
        if isinstance(item, Gather):
            self._gather(item)
        elif isinstance(item, Linear):
            self._linear(item)
        elif isinstance(item, ExpertLinear):
            self._expert_linear(item)
        elif isinstance(item, TopK):
            self._top_k(item)
        elif isinstance(item, Attention):
            self._attention(item)
        elif isinstance(item, Embedding):
            self._embedding(item)
        else:
            self._island(item)

    def _pointer(self, word: int) -> str:
        return self.t.word("%args", word, "!llvm.ptr")

    def _base(self, row: Row) -> str:
        """Address of a value's first row."""
        pointer = self._pointer(row.word)
        return self.t.gep(pointer, row.column, row.element) if row.column else pointer

    def _optional(self, word: int | None) -> str:
        """What a word holds, or a null pointer."""
        return self.t.op("llvm.mlir.zero : !llvm.ptr") if word is None else self._pointer(word)

    def _i64(self, value: int) -> tuple[str, str]:
        return self.t.constant(value), "i64"

    def _call(self, symbol: str, values: list[str], kinds: list[str]) -> None:
        self.t.call(symbol, list(zip(values, kinds, strict=True)))

    def _gather(self, item: Gather) -> None:
        t = self.t
        index = step_word(t, StepWord.ROW_INDEX, "!llvm.ptr")
        source, to = self._base(item.source), self._base(item.to)
        low, high = thread_share(t, self.count, "%tid", self.team)
        zero, one, lanes = t.constant(0), t.constant(1), t.constant(self.target.lanes)
        vector = f"vector<{self.target.lanes}xf32>"
        words = item.source.stride * (2 if item.source.dtype == "i64" else 1)
        width = t.constant(words)
        with t.loop(low, high, one) as row:
            token = t.load(t.gep(index, row.index, "i64"), "i64", 8)
            read = t.gep(source, t.mul(token, width))
            write = t.gep(to, t.mul(row.index, width))
            with t.loop(zero, width, lanes) as column:
                value = t.load(t.gep(read, column.index), vector)
                t.store(value, t.gep(write, column.index), vector)

    def _linear(self, item: Linear) -> None:
        t = self.t
        scratch = self._thread_scratch()
        values = [
            self._base(item.x),
            t.constant(item.x.stride),
            self._base(item.out),
            t.constant(item.out.stride),
            self._pointer(item.weight),
            self._optional(item.bias),
            self.count,
            t.constant(item.depth),
            t.constant(item.panels),
            "%tid",
            self.team,
            scratch,
        ]
        symbol = linear.linear_name(weight_format(item.form))
        self._call(symbol, values, [kind for _, kind in linear.SIGNATURE])

    def _expert_linear(self, item: ExpertLinear) -> None:
        t, form = self.t, weight_format(item.form)
        values = [
            self._base(item.x),
            t.constant(item.x.stride),
            t.constant(item.step),
            self._base(item.choice),
            t.constant(item.choice.stride),
            self._base(item.out),
            t.constant(item.out.stride),
            self._pointer(item.weight),
            self._optional(item.bias),
            t.constant(panel_bytes(form, item.depth, self.target.panel)),
            self.count,
            t.constant(item.choices),
            t.constant(item.experts),
            t.constant(item.depth),
            t.constant(item.outputs),
            "%tid",
            self.team,
            self._thread_scratch(),
        ]
        self._call(experts.experts_name(form), values, [kind for _, kind in experts.SIGNATURE])

    def _top_k(self, item: TopK) -> None:
        t = self.t
        values = [
            self._base(item.x),
            t.constant(item.x.stride),
            t.constant(item.rows),
            t.constant(item.width),
            self._base(item.out),
            t.constant(item.out.stride),
            t.constant(item.count),
            self.count,
            "%tid",
            self.team,
        ]
        self._call(top_k.TOP_K, values, [kind for _, kind in top_k.SIGNATURE])

    def _thread_scratch(self) -> str:
        t = self.t
        base = step_word(t, StepWord.SCRATCH, "!llvm.ptr")
        return t.gep(base, t.mul("%tid", step_word(t, StepWord.SCRATCH_STRIDE)), "i8")

    def _attention(self, item: Attention) -> None:
        t = self.t
        values = []
        for row in (item.q, item.k, item.v, item.out):
            values += [self._base(row), t.constant(row.stride)]
        values += [
            t.constant(item.kv_heads),
            t.word("%args", item.kv),
            t.constant(item.scale, "f32"),
            t.constant(item.window),
            t.constant(item.softcap, "f32"),
            self._optional(item.sinks),
            self._optional(item.slopes),
            "%step",
            "%tid",
        ]
        self._call(item.shape.name, values, [kind for _, kind in attention.SIGNATURE])

    def _embedding(self, item: Embedding) -> None:
        t = self.t
        values = [
            self._base(item.ids),
            t.constant(item.ids.stride),
            self._pointer(item.table),
            self._base(item.out),
            t.constant(item.out.stride),
            self.count,
            t.constant(item.depth),
            "%tid",
            self.team,
        ]
        symbol = embedding.embedding_name(weight_format(item.form))
        self._call(symbol, values, [kind for _, kind in embedding.SIGNATURE])

    def _island(self, item: IslandCall) -> None:
        t = self.t
        arguments = [*item.inputs, *item.outputs]
        bases = [self._base(a) if isinstance(a, Row) else self._pointer(a) for a in arguments]
        low, high = thread_share(t, self.count, "%tid", self.team)
        with t.loop(low, high, t.constant(1)) as token:
            pointers = []
            for argument, base in zip(arguments, bases, strict=True):
                if isinstance(argument, Row):
                    offset = t.mul(token.index, t.constant(argument.stride))
                    base = t.gep(base, offset, argument.element)
                pointers.append(base)
            symbol = island_symbol(self.name, item.source)
            self._call(symbol, pointers, ["!llvm.ptr"] * len(pointers))
