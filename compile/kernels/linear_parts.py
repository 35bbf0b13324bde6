"""What the linear kernels of registers and of the matrix unit have in common.

Weights lie in panels of `Target.panel` outputs side by side over all of K, in a weight format (see
`formats`); K is walked in parts that fit the caches.
"""

from collections.abc import Sequence

from buddy_pipeline.compile.formats.base import (
    WeightFormat,
    depth_step,
    head_bytes,
    most_depth,
    row_bytes,
    tile_rows,
)
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Register tiles in one block of tokens; the packed block fills a fraction of L2.
BLOCK_TILES = 9

#: Argument names and types of the kernel: activations and their row stride (elements), output and
#: its row stride, packed weights, bias or null, sizes, parts whose panels take turns, the epilogue
#: or null and what it is given first, thread id and team size, thread scratch.
SIGNATURE = [
    ("x", "!llvm.ptr"),
    ("ldx", "i64"),
    ("out", "!llvm.ptr"),
    ("ldo", "i64"),
    ("w", "!llvm.ptr"),
    ("bias", "!llvm.ptr"),
    ("tokens", "i64"),
    ("depth", "i64"),
    ("panels", "i64"),
    ("turns", "i64"),
    ("epilogue", "!llvm.ptr"),
    ("context", "!llvm.ptr"),
    ("tid", "i64"),
    ("team", "i64"),
    ("scratch", "!llvm.ptr"),
]
#: What does not depend on the thread.
SIZES = SIGNATURE[:-3]


def linear_name(form: WeightFormat) -> str:
    """The kernel's symbol."""
    return f"bp_linear_{form.name}"


class LinearParts:
    """Writes the functions and addresses that the kernels share."""

    def __init__(self, target: Target, form: WeightFormat) -> None:
        self.t = Text()
        self.target = target
        self.form = form
        self.activation = form.activation(target)
        self.row_bytes = row_bytes(target, self.activation)
        self.tile_rows = tile_rows(target, form)
        self.most_depth = most_depth(target, form, self.activation)
        self.vector = f"vector<{target.lanes}xf32>"

    def panel_bytes(self) -> str:
        """Bytes of one panel of this matrix."""
        t, form, panel = self.t, self.form, self.target.panel
        units = ceil_div(t, "%depth", form.unit)
        size = t.mul(units, t.constant(form.unit_bytes(panel)))
        return t.add(size, t.constant(head_bytes(form, panel))) if form.scaled else size

    def weights_at(self, panel: str, k: str) -> str:
        """Address of depth k (a multiple of the unit) in a panel."""
        number = self.t.binary("arith.divui", k, self.t.constant(self.form.unit))
        size = self.t.constant(self.form.unit_bytes(self.target.panel))
        first = self.t.gep(panel, head_bytes(self.form, self.target.panel), "i8")
        return self.t.gep(first, self.t.mul(number, size), "i8")

    def ends(self, k: str, depth: str) -> tuple[str, str]:
        """Whether the block of `depth` at k is the first of K, and whether it is the last."""
        t = self.t
        first = t.compare("eq", k, t.constant(0))
        return first, t.compare("eq", t.add(k, depth), "%depth")

    def block(self) -> str:
        """Depth of the cache blocks over K."""
        return self.even_part("%depth", self.t.constant(self.most_depth))

    def even_part(self, total: str, most: str) -> str:
        """Depth of parts of `total`, at most `most` each: as few as fit, of one size but for the
        last."""
        t = self.t
        step = depth_step(self.form, self.activation)
        count = t.binary("arith.ceildivui", total, most)
        even = t.binary("arith.ceildivui", total, t.binary("arith.maxui", count, t.constant(1)))
        return t.mul(ceil_div(t, even, step), t.constant(step))

    def block_depth(self, k: str, block: str) -> str:
        """Depth of the K block that starts at k."""
        return self.part_length(k, block, "%depth")

    def part_length(self, start: str, part: str, total: str) -> str:
        """Depth of the part of `total` that begins at `start`."""
        return self.t.binary("arith.minui", self.t.binary("arith.subi", total, start), part)

    def bias_at(self, panel: str) -> str:
        """Address of the bias of `panel`, or null when there is none."""
        t = self.t
        place = t.gep("%bias", t.mul(panel, t.constant(self.target.panel)))
        return t.select(t.is_null("%bias"), "%bias", place, "!llvm.ptr")

    def call(self, name: str, args: Sequence[tuple[str, str]], values: Sequence[str]) -> list[str]:
        """Calls a function that returns nothing; `args` are its own names and types."""
        self.t.call(name, [(value, kind) for value, (_, kind) in zip(values, args, strict=True)])
        return []


def ceil_div(t: Text, value: str, by: int) -> str:
    """value / by, rounded up; both are positive i64."""
    if by == 1:
        return value
    return t.binary("arith.divui", t.add(value, t.constant(by - 1)), t.constant(by))
