"""Templates: one partition's fragments written as one function that a team of threads runs.

A template is `name(args, step, tid)`: `args` is a table of 8-byte words (addresses of activations,
parameters and temporaries, and KV offsets), so layers of one structure share the code.
"""

from collections.abc import Mapping

from buddy_pipeline.compile.draft import (
    Attention,
    Draft,
    Embedding,
    ExpertLinear,
    Gather,
    IslandCall,
    Item,
    Linear,
    Row,
    TopK,
)
from buddy_pipeline.compile.formats import weight_format
from buddy_pipeline.compile.formats.base import panel_bytes
from buddy_pipeline.compile.kernels.linear_outputs import EPILOGUE_SIGNATURE
from buddy_pipeline.compile.kernels.step import (
    declare_end_region,
    end_region,
    step_word,
    thread_share,
)
from buddy_pipeline.compile.manifest import StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.template_epilogues import emit_epilogue
from buddy_pipeline.compile.template_kernels import draft_kernels, item_kernel
from buddy_pipeline.compile.template_symbols import (
    epilogue_symbol,
    instance_prefix,
    island_symbol,
)


def emit_template(draft: Draft, name: str, target: Target, *, instances: bool = False) -> str:
    """MLIR text of the module with the template as function `name`, without islands' bodies.

    It calls kernels that others call too or, with `instances`, for each item one of its own; see
    `instance_prefix`.
    """
    t = Text()
    declare_end_region(t)
    symbols = {
        number: (instance_prefix(name, number) if instances else "") + kernel.symbol
        for number, kernel in draft_kernels(draft, target)
    }
    _declare(t, draft, name, target, symbols)
    for number, item in enumerate(draft.items):
        if isinstance(item, Linear) and item.epilogue is not None:
            emit_epilogue(t, item, name, number, target)
    args = [("args", "!llvm.ptr"), ("step", "!llvm.ptr"), ("tid", "i64")]
    with t.function(name, args):
        team = step_word(t, StepWord.TEAM)
        count = step_word(t, StepWord.ROWS if draft.counts == "rows" else StepWord.TOKENS)
        writer = _Writer(t, name, team, count, target, symbols)
        for number, item in enumerate(draft.items):
            t.line(f"// {number}: {type(item).__name__}")
            writer.write(item, number)
            end_region(t)
        t.line("return")
    return str(t)


def _declare(t: Text, draft: Draft, name: str, target: Target, symbols: Mapping[int, str]) -> None:
    """Declarations of the kernels, by item, and islands that the template calls."""
    signatures = {symbols[number]: kernel.types for number, kernel in draft_kernels(draft, target)}
    for item in draft.items:
        island = item.epilogue if isinstance(item, Linear) else item
        if isinstance(island, IslandCall):
            count = len(island.inputs) + len(island.outputs)
            signatures[island_symbol(name, island.source)] = ["!llvm.ptr"] * count
    for symbol, kinds in signatures.items():
        t.line(f"func.func private @{symbol}({', '.join(kinds)})")


class _Writer:
    """Writes the items of one template."""

    def __init__(
        self,
        t: Text,
        name: str,
        team: str,
        count: str,
        target: Target,
        symbols: Mapping[int, str],
    ) -> None:
        self.t = t
        self.name = name
        self.team = team
        self.count = count
        self.target = target
        self.symbols = symbols
        self.number = 0

    def write(self, item: Item, number: int) -> None:
        """Writes one item as calls and loops."""
        self.number = number
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

    def _call(self, item: Item, values: list[str]) -> None:
        """A call of the item's kernel."""
        kernel = item_kernel(item, self.target)
        assert kernel is not None
        self.t.call(self.symbols[self.number], list(zip(values, kernel.types, strict=True)))

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
            t.constant(item.turns),
            self._epilogue(item),
            "%args",
            "%tid",
            self.team,
            scratch,
        ]
        self._call(item, values)

    def _epilogue(self, item: Linear) -> str:
        """Address of the item's epilogue, or a null pointer."""
        if item.epilogue is None:
            return self._optional(None)
        symbol = epilogue_symbol(self.name, self.number)
        return self.t.function_address(symbol, [kind for _, kind in EPILOGUE_SIGNATURE])

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
        self._call(item, values)

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
        self._call(item, values)

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
        self._call(item, values)

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
        self._call(item, values)

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
            t.call(symbol, [(pointer, "!llvm.ptr") for pointer in pointers])
