"""Which scores of a tile count: those of positions that the row's token sees."""

from dataclasses import dataclass

from buddy_pipeline.compile.kernels.attention_shape import Rows
from buddy_pipeline.compile.mlir_text import Text


@dataclass(frozen=True)
class Seen:
    """What the tokens of a tile see of a span: the place of the first token, and the window."""

    t: Text
    lanes: int
    rows: Rows
    last: str
    window: str

    def alone(self, scores: list[str], start: str, vectors: int) -> list[str]:
        """`scores`, row by row `vectors` of them with the places from `start` on, and -∞ for what
        the row's token does not see. Most tiles are seen as a whole, by every token."""
        t = self.t
        final = t.add(start, t.constant(vectors * self.lanes - 1))
        hidden = t.binary(
            "arith.ori",
            t.compare("sgt", final, self.last),
            t.compare("sle", start, self._before(self.rows.tokens - 1)),
            "i1",
        )
        kinds = [f"vector<{self.lanes}xf32>"] * len(scores)
        return t.choose(hidden, lambda: self._masked(scores, start, vectors), lambda: scores, kinds)

    def _masked(self, scores: list[str], start: str, vectors: int) -> list[str]:
        t, vector = self.t, f"vector<{self.lanes}xf32>"
        lowest = t.op(f"arith.constant dense<0xFF800000> : {vector}")
        kinds = f"vector<{self.lanes}xi1>, {vector}"
        masks = [
            self._mask(token, t.add(start, t.constant(j * self.lanes)))
            for token in range(self.rows.tokens)
            for j in range(vectors)
        ]
        masked = []
        for number, score in enumerate(scores):
            row, j = divmod(number, vectors)
            mask = masks[row // self.rows.heads * vectors + j]
            masked.append(t.op(f"arith.select {mask}, {score}, {lowest} : {kinds}"))
        return masked

    def _mask(self, token: int, start: str) -> str:
        """Which of the places start, start + 1, … a token sees."""
        t, whole = self.t, f"vector<{self.lanes}xi32>"
        numbers = ", ".join(map(str, range(self.lanes)))
        places = t.op(f"arith.constant dense<[{numbers}]> : {whole}")

        def relative(place: str) -> str:
            number = t.binary("arith.subi", place, start)
            return t.broadcast(t.op(f"arith.trunci {number} : i64 to i32"), whole, "i32")

        after = t.compare("sgt", places, relative(self._before(token)), whole)
        until = t.compare("sle", places, relative(self._place(token)), whole)
        return t.binary("arith.andi", after, until, f"vector<{self.lanes}xi1>")

    def _place(self, token: int) -> str:
        """The last place that a token sees, its own, which may lie behind the span."""
        return self.t.add(self.last, self.t.constant(token))

    def _before(self, token: int) -> str:
        """The place before the first one that a token sees; -1 where it sees the span's first."""
        t = self.t
        none = t.constant(-1)
        edge = t.binary("arith.subi", self._place(token), self.window)
        edge = t.binary("arith.maxsi", edge, none)
        return t.select(t.compare("eq", self.window, t.constant(0)), none, edge, "i64")
