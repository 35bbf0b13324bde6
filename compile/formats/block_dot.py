"""Integer sums of one block of weights and activations, for the formats that multiply bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from buddy_pipeline.compile.formats.base import row_bytes
from buddy_pipeline.compile.formats.block_layout import BLOCK, GROUP
from buddy_pipeline.compile.formats.integer_activation import UPPER, IntegerBlocks
from buddy_pipeline.compile.formats.integer_dot import Codes, IntegerDot
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target


@dataclass(frozen=True)
class BlockDot:
    """One block of the activation rows of a tile, the first at `inputs`."""

    t: Text
    target: Target
    activation: IntegerBlocks
    dot: IntegerDot
    rows: int
    inputs: str

    @property
    def words(self) -> str:
        """A vector of i32."""
        return f"vector<{self.target.lanes}xi32>"

    def scale(self, row: int) -> str:
        """The scale of a row's block in all lanes."""
        return self._spread(row, self.activation.scale_at, "f32")

    def scaled_sum(self, row: int) -> str:
        """d · Σ q of a row's block in all lanes, where the activation is `scaled`."""
        return self._spread(row, self.activation.sum_at(0), "f32")

    def totals(
        self,
        codes: Codes,
        groups: Sequence[int],
        weights: Callable[[int], list[str]],
        vectors: int,
        run: int = 0,
    ) -> dict[tuple[int, int], str]:
        """Σ (code - zero) · q over the groups of a run as f32, by (row, vector of outputs).

        `weights(group)` writes the words of each vector.
        """
        t, parts = self.t, self.activation.parts
        nothing, starts = t.constant(0, self.words), {}
        for row in range(self.rows):
            for part in range(parts):
                biased = self.activation.bias and part == parts - 1
                start = self._spread(row, self.activation.sum_at(run), "i32") if biased else nothing
                starts.update({(parts * row + part, v): start for v in range(vectors)})

        def four(place: int, group: int) -> str:
            row, part = divmod(place, parts)
            return self._spread(row, BLOCK * part + GROUP * group, "i32")

        sums = self.dot.emit(t, codes, groups, weights, four, starts)
        return {
            (row, v): self._whole([sums[parts * row + part, v] for part in range(parts)])
            for row in range(self.rows)
            for v in range(vectors)
        }

    def _whole(self, sums: list[str]) -> str:
        """The sum of both parts, exact: at most 32 · 32,512 · 255 (and as much of the bias)."""
        t, i = self.t, self.words
        total = sums[-1]
        if len(sums) > 1:
            assert UPPER == (1 << 8) - 1
            shifted = t.binary("arith.shli", sums[0], t.constant(8, i), i)
            upper = t.binary("arith.subi", shifted, sums[0], i)
            total = t.binary("arith.addi", upper, total, i)
        return t.op(f"arith.sitofp {total} : {i} to vector<{self.target.lanes}xf32>")

    def _spread(self, row: int, offset: int, element: str) -> str:
        """A word of a row's packed block in all lanes."""
        stride = row_bytes(self.target, self.activation)
        word = self.t.load(self.t.gep(self.inputs, row * stride + offset, "i8"), element)
        return self.t.broadcast(word, f"vector<{self.target.lanes}x{element}>", element)
