"""The experts kernel: each row times the matrices of the experts that its token chose.

The rows of a step that chose one expert are gathered, multiplied by the linear kernel, and
scattered to where they belong. So an expert's weights are read once for all its rows, experts that
nobody chose are not read, and a row's result is the linear kernel's: one chain of multiply-adds
over K, whatever else is in the step.
"""

from buddy_pipeline.compile.formats.activation import Plain
from buddy_pipeline.compile.formats.base import WeightFormat, tile_rows
from buddy_pipeline.compile.kernels.linear import SIGNATURE as LINEAR_SIGNATURE
from buddy_pipeline.compile.kernels.linear import linear_name, linear_scratch_bytes
from buddy_pipeline.compile.kernels.step import thread_share
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Register tiles of rows that are gathered together, to which an expert's weights come once.
GROUP_TILES = 4
#: Weight panels that are multiplied before their results are scattered, so that these stay in L2.
GROUP_PANELS = 64
#: Bytes of a gathered row's entry: where it comes from and where its result goes, in elements.
_ENTRY_BYTES = 16
#: Elements that a gathered row's length is a multiple of: a cache line.
_ROW_ELEMENTS = 16

#: Argument names and types: activations, the stride of a token and of its rows (0 where all its
#: choices read one row), int64 choices and their token stride, output (a token's rows lie one after
#: the other) and its token stride, packed weights and biases or null, bytes of one expert's weights
#: and of one panel, tokens, choices of each, experts, sizes, thread id and team, thread scratch.
SIGNATURE = [
    ("x", "!llvm.ptr"),
    ("ldx", "i64"),
    ("step_x", "i64"),
    ("choice", "!llvm.ptr"),
    ("ldi", "i64"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("w", "!llvm.ptr"),
    ("bias", "!llvm.ptr"),
    ("panel_bytes", "i64"),
    ("tokens", "i64"),
    ("choices", "i64"),
    ("experts", "i64"),
    ("depth", "i64"),
    ("outputs", "i64"),
    ("tid", "i64"),
    ("team", "i64"),
    ("scratch", "!llvm.ptr"),
]
_GROUP_ARGS = [
    ("x", "!llvm.ptr"),
    ("out", "!llvm.ptr"),
    ("w", "!llvm.ptr"),
    ("bias", "!llvm.ptr"),
    ("panel_bytes", "i64"),
    ("rows", "i64"),
    ("depth", "i64"),
    ("outputs", "i64"),
    ("member", "i64"),
    ("team", "i64"),
    ("scratch", "!llvm.ptr"),
]
_COPY_ARGS = [("source", "!llvm.ptr"), ("to", "!llvm.ptr"), ("count", "i64")]


def experts_name(form: WeightFormat) -> str:
    """The kernel's symbol."""
    return f"bp_experts_{form.name}"


def experts_scratch_bytes(target: Target, form: WeightFormat, depth: int) -> int:
    """Bytes of scratch per thread that the kernel needs for K = `depth`."""
    rows = _group_rows(target, form)
    results = rows * GROUP_PANELS * target.panel * 4
    length = -(-depth // _ROW_ELEMENTS) * _ROW_ELEMENTS
    return results + rows * (_ENTRY_BYTES + 4 * length) + linear_scratch_bytes(target, form, depth)


def emit_experts(target: Target, form: WeightFormat) -> str:
    """MLIR text of the module that holds the kernel of a weight format."""
    return str(_Experts(target, form).emit())


def _group_rows(target: Target, form: WeightFormat) -> int:
    return GROUP_TILES * tile_rows(target, form)


class _Experts:
    """Writes the functions of one kernel.

    A thread's scratch holds the results of a group, the entries of its rows, the rows themselves,
    and what the linear kernel needs.
    """

    def __init__(self, target: Target, form: WeightFormat) -> None:
        self.t = Text()
        self.target = target
        self.form = form
        self.most = _group_rows(target, form)
        self.result_stride = GROUP_PANELS * target.panel

    def emit(self) -> Text:
        """All functions, callees first."""
        kinds = ", ".join(kind for _, kind in LINEAR_SIGNATURE)
        self.t.line(f"func.func private @{linear_name(self.form)}({kinds})")
        self._copy()
        self._group()
        self._entry()
        return self.t

    def _copy(self) -> None:
        """`copy(source, to, count)`: f32 elements."""
        t = self.t
        with t.function("copy", _COPY_ARGS, private=True):
            Plain().emit_row(t, self.target, "%source", "%to", "%count", "%count")
            t.line("return")

    def _entries(self, scratch: str) -> str:
        return self.t.gep(scratch, self.most * self.result_stride)

    def _group(self) -> None:
        """`group(…)`: the rows whose entries are in scratch times one expert's matrix; the team's
        `member` takes its share of the panels."""
        t, width = self.t, self.target.panel
        with t.function("group", _GROUP_ARGS, private=True):
            zero, one, none = t.constant(0), t.constant(1), t.op("llvm.mlir.zero : !llvm.ptr")
            entries = self._entries("%scratch")
            gathered = t.gep(entries, self.most * _ENTRY_BYTES, "i8")
            unit = t.constant(_ROW_ELEMENTS)
            length = t.mul(t.binary("arith.ceildivui", "%depth", unit), unit)
            rest = t.gep(gathered, t.mul(t.constant(self.most), length))
            with t.loop(zero, "%rows", one) as row:
                source = t.word(self._entry_of(entries, row.index), 0)
                to = t.gep(gathered, t.mul(row.index, length))
                self._call_copy(t.gep("%x", source), to, "%depth")
            panels = t.binary("arith.ceildivui", "%outputs", t.constant(width))
            low, high = thread_share(t, panels, "%member", "%team")
            step, stride = t.constant(GROUP_PANELS), t.constant(self.result_stride)
            with t.loop(low, high, step) as panel:
                count = t.binary("arith.minui", t.binary("arith.subi", high, panel.index), step)
                first = t.mul(panel.index, t.constant(width))
                call = [
                    gathered,
                    length,
                    "%scratch",
                    stride,
                    t.gep("%w", t.mul(panel.index, "%panel_bytes"), "i8"),
                    self._bias_at("%bias", first),
                    "%rows",
                    "%depth",
                    count,
                    one,
                    none,
                    none,
                    zero,
                    one,
                    rest,
                ]
                kinds = [kind for _, kind in LINEAR_SIGNATURE]
                t.call(linear_name(self.form), list(zip(call, kinds, strict=True)))
                # The last panel may end in columns that the matrix does not have.
                columns = t.binary(
                    "arith.minui",
                    t.mul(count, t.constant(width)),
                    t.binary("arith.subi", "%outputs", first),
                )
                with t.loop(zero, "%rows", one) as row:
                    place = t.word(self._entry_of(entries, row.index), 1)
                    result = t.gep("%scratch", t.mul(row.index, stride))
                    self._call_copy(result, t.gep("%out", t.add(place, first)), columns)
            t.line("return")

    def _entry(self) -> None:
        """The kernel: for each expert, its rows in groups of at most `most`.

        Every thread finds the groups by itself, which takes less time than a barrier would.
        """
        t = self.t
        with t.function(experts_name(self.form), SIGNATURE):
            zero, one = t.constant(0), t.constant(1)
            with t.loop(zero, "%experts", one, [(zero, "i64")]) as expert:
                start = [(zero, "i64"), (expert.carried[0], "i64")]
                with t.loop(zero, "%tokens", one, start) as token:
                    so_far = [(name, "i64") for name in token.carried]
                    with t.loop(zero, "%choices", one, so_far) as j:
                        j.next = self._visit(expert.index, token.index, j.index, *j.carried)
                    token.next = j.results
                expert.next = self._finish(expert.index, *token.results)
            t.line("return")

    def _visit(self, expert: str, token: str, j: str, rows: str, groups: str) -> list[str]:
        """Notes the row of a token's choice if it is of this expert; multiplies a group that is
        full. Returns the rows noted and the number of groups then."""
        t = self.t

        def note() -> list[str]:
            entry = self._entry_of(self._entries("%scratch"), rows)
            source = t.add(t.mul(token, "%ldx"), t.mul(j, "%step_x"))
            place = t.add(t.mul(token, "%ldo"), t.mul(j, "%outputs"))
            t.store(source, entry, "i64", 8)
            t.store(place, t.gep(entry, 1, "i64"), "i64", 8)
            more = t.add(rows, t.constant(1))
            return t.choose(
                t.compare("eq", more, t.constant(self.most)),
                lambda: [t.constant(0), self._run(expert, more, groups)],
                lambda: [more, groups],
                ["i64", "i64"],
            )

        place = t.gep("%choice", t.add(t.mul(token, "%ldi"), j), "i64")
        is_chosen = t.compare("eq", t.load(place, "i64", 8), expert)
        return t.choose(is_chosen, note, lambda: [rows, groups], ["i64", "i64"])

    def _finish(self, expert: str, rows: str, groups: str) -> list[str]:
        """Multiplies the rows that are left; returns the number of groups then."""
        t = self.t
        some = t.compare("ugt", rows, t.constant(0))
        return t.choose(some, lambda: [self._run(expert, rows, groups)], lambda: [groups], ["i64"])

    def _run(self, expert: str, rows: str, groups: str) -> str:
        """Multiplies the rows noted so far with an expert's matrix; returns the number of groups.

        From group to group threads change places, so that another one gets a panel more.
        """
        t, width = self.t, self.t.constant(self.target.panel)
        panels = t.binary("arith.ceildivui", "%outputs", width)
        before = t.mul(expert, panels)
        values = [
            "%x",
            "%out",
            t.gep("%w", t.mul(before, "%panel_bytes"), "i8"),
            self._bias_at("%bias", t.mul(before, width)),
            "%panel_bytes",
            rows,
            "%depth",
            "%outputs",
            t.op(f"arith.remui {t.add('%tid', groups)}, %team : i64"),
            "%team",
            "%scratch",
        ]
        t.call("group", list(zip(values, [kind for _, kind in _GROUP_ARGS], strict=True)))
        return t.add(groups, t.constant(1))

    def _entry_of(self, entries: str, row: str) -> str:
        return self.t.gep(entries, self.t.mul(row, self.t.constant(_ENTRY_BYTES)), "i8")

    def _bias_at(self, bias: str, column: str) -> str:
        """Address of a column's bias, or null when there is none."""
        t = self.t
        return t.select(t.is_null(bias), bias, t.gep(bias, column), "!llvm.ptr")

    def _call_copy(self, source: str, to: str, count: str) -> None:
        values = [source, to, count]
        self.t.call("copy", list(zip(values, [kind for _, kind in _COPY_ARGS], strict=True)))
