"""Where a linear's outputs go, and the epilogue that works on them when they are finished.

Where panels of several parts take turns (those of gate and up), a thread works on whole groups of
them, one panel of each part. It calls the epilogue on each group, or on all of them at once where
there are few tokens.
"""

from buddy_pipeline.compile.formats.base import WeightFormat
from buddy_pipeline.compile.kernels.linear_parts import BLOCK_TILES, LinearParts
from buddy_pipeline.compile.kernels.step import thread_share
from buddy_pipeline.compile.target import Target

#: Panels of a group whose outputs can wait for their epilogue in scratch.
NEAR_PANELS = 2
#: Names and types of an epilogue, which a thread calls on outputs that it has just finished: its
#: context, the outputs of token `row` and group `group` and their row stride, tokens, and groups.
EPILOGUE_SIGNATURE = [
    ("context", "!llvm.ptr"),
    ("outputs", "!llvm.ptr"),
    ("ldo", "i64"),
    ("row", "i64"),
    ("rows", "i64"),
    ("group", "i64"),
    ("groups", "i64"),
]


def near_bytes(target: Target, rows: int) -> int:
    """Bytes of scratch for the outputs of a group, for `rows` tokens."""
    return 4 * NEAR_PANELS * target.panel * rows


class LinearOutputs(LinearParts):
    """Writes what the kernels share of it."""

    def __init__(self, target: Target, form: WeightFormat) -> None:
        super().__init__(target, form)
        self.near_bytes = near_bytes(target, BLOCK_TILES * self.tile_rows)

    def share(self, blocks: str) -> tuple[str, str]:
        """This thread's range of the panels of `blocks` blocks of tokens, in whole groups."""
        t = self.t
        groups = t.mul(blocks, t.binary("arith.divui", "%panels", "%turns"))
        low, high = thread_share(t, groups, "%tid", "%team")
        return t.mul(low, "%turns"), t.mul(high, "%turns")

    def outputs(self, at_once: str, out: str, near: str) -> tuple[str, str, str]:
        """Where outputs go: address, row stride, and panels after which they are there again.

        An epilogue's outputs stay `near`, each group in place of the one before, if `at_once` says
        that a group's chains run from one end to the other: written to %out they would leave the
        near caches (bf16 in a matrix unit, gate and up of 256 tokens with their product: 0.78 of
        the time).
        """
        t = self.t
        fits = t.compare("ule", "%turns", t.constant(NEAR_PANELS))
        for condition in (t.is_set("%epilogue"), at_once):
            fits = t.binary("arith.andi", fits, condition, "i1")
        stride = t.mul("%turns", t.constant(self.target.panel))
        return (
            t.select(fits, near, out, "!llvm.ptr"),
            t.select(fits, stride, "%ldo", "i64"),
            t.select(fits, "%turns", "%panels", "i64"),
        )

    def column(self, out: str, panel: str, around: str) -> str:
        """Address of a panel's first output; see `outputs`."""
        t = self.t
        place = t.op(f"arith.remui {panel}, {around} : i64")
        return t.gep(out, t.mul(place, t.constant(self.target.panel)))

    def finish(self, outputs: str, ldo: str, row: str, rows: str, low: str, high: str) -> None:
        """Calls the epilogue, where there is one, on the whole groups of panels low … high of
        `rows` tokens from `row` on, whose first output is at `outputs`."""
        t = self.t
        with t.when(t.is_set("%epilogue")):
            group = t.binary("arith.divui", low, "%turns")
            groups = t.binary("arith.divui", t.binary("arith.subi", high, low), "%turns")
            values = ["%context", outputs, ldo, row, rows, group, groups]
            kinds = ", ".join(kind for _, kind in EPILOGUE_SIGNATURE)
            t.line(f"llvm.call %epilogue({', '.join(values)}) : !llvm.ptr, ({kinds}) -> ()")

    def finish_group(self, outputs: str, ldo: str, row: str, rows: str, panel: str) -> None:
        """The same for the group that ends with `panel`, if one does; %outputs are the panel's."""
        t = self.t
        high = t.add(panel, t.constant(1))
        with t.when(t.compare("eq", t.op(f"arith.remui {high}, %turns : i64"), t.constant(0))):
            before = t.binary("arith.subi", t.constant(1), "%turns")
            first = t.gep(outputs, t.mul(before, t.constant(self.target.panel)))
            self.finish(first, ldo, row, rows, t.add(panel, before), high)
