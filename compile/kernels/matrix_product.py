"""Products of tiles: 16 or 32 tokens by one or two panels of outputs over a block of K."""

from buddy_pipeline.compile.formats.base import MATRIX_ROWS, prefetch
from buddy_pipeline.compile.kernels.linear_parts import LinearParts
from buddy_pipeline.compile.kernels.matrix_pack import (
    PACKED_STEP,
    PACKED_TILE,
    has_rest,
    weight_step,
)
from buddy_pipeline.compile.kernels.matrix_tiles import (
    SUMS,
    TILE_DEPTH,
    TILE_ROW_BYTES,
    TOKENS,
    WEIGHTS,
    WIDE,
    emit_unit,
)
from buddy_pipeline.compile.mlir_text import CACHE_LINE

#: In place of a number of lines: a product that reads its weights from memory itself.
STREAM = -1

_ARGS = {
    "a": "!llvm.ptr",
    "w": "!llvm.ptr",
    "wend": "!llvm.ptr",
    "c": "!llvm.ptr",
    "ldc": "i64",
    "depth": "i64",
    "goes_on": "i1",
}


class MatrixProduct:
    """Writes `product_R_P_F(a, w, wend, c, ldc, depth, goes_on[, wstride][, ahead])`: c (+)= a · w
    for R tiles of as many tokens as the configuration says, and P panels, `wstride` bytes apart.

    `a` are packed steps of K, `wend` holds the panels' weights of the last depth % 32; `goes_on`
    says whether sums start from c. With each step F lines are asked for of the block at `ahead`.
    """

    def __init__(self, parts: LinearParts, rows: int, panels: int, fetched: int) -> None:
        self._t, self._target = parts.t, parts.target
        self._rows, self._panels, self._fetched = rows, panels, fetched
        self._places = [(r, p, v) for r in range(rows) for p in range(panels) for v in range(WIDE)]
        self._sums = dict(zip(self._places, SUMS[: len(self._places)], strict=True))
        self._step_bytes = weight_step(parts.target)

    def emit(self) -> None:
        """The function."""
        t, size = self._t, self._step_bytes
        name = _name(self._rows, self._panels, self._fetched)
        args = list(_args(self._panels, self._fetched).items())
        with t.function(name, args, private=True):
            outputs, stride = self._outputs(), (t.mul("%ldc", t.constant(4)), "i64")

            def load() -> list[str]:
                for register, place in outputs.items():
                    emit_unit(t, "tileloadd64", register, (place, "!llvm.ptr"), stride)
                return []

            def clear() -> list[str]:
                for register in outputs:
                    emit_unit(t, "tilezero", register)
                return []

            t.choose("%goes_on", load, clear, [])
            streams = ["%w"]
            if self._panels > 1:
                streams.append(t.gep("%w", "%wstride", "i8"))
            whole = t.binary("arith.divui", "%depth", t.constant(TILE_DEPTH))
            with t.loop(t.constant(0), whole, t.constant(1)) as k:
                offset = t.mul(k.index, t.constant(size))
                weights = [t.gep(stream, offset, "i8") for stream in streams]
                self._fetch(weights, offset)
                self._step(k.index, weights)
            with t.when(has_rest(t, "%depth")):
                self._step(whole, [t.gep("%wend", p * size, "i8") for p in range(self._panels)])
            for register, place in outputs.items():
                emit_unit(t, "tilestored64", register, (place, "!llvm.ptr"), stride)
            t.line("return")

    def _outputs(self) -> dict[int, str]:
        """Where the sums of each register belong."""
        t = self._t
        tiles = ["%c", t.gep("%c", t.mul("%ldc", t.constant(MATRIX_ROWS)))]
        return {
            register: t.gep(tiles[r], p * self._target.panel + v * MATRIX_ROWS)
            for (r, p, v), register in self._sums.items()
        }

    def _fetch(self, weights: list[str], offset: str) -> None:
        """Asks for weights: half a step ahead of a stream, where memory is the limit (further
        ahead it gives less), else for both halves of the next block at once (0.99 to 1.06 times
        as fast as in order)."""
        t, half = self._t, self._step_bytes // 2
        if self._fetched == STREAM:
            for place in weights:
                prefetch(t, t.gep(place, half, "i8"), self._step_bytes)
            return
        steps = t.binary("arith.divui", "%depth", t.constant(TILE_DEPTH))
        first = t.gep("%ahead", t.binary("arith.shrui", offset, t.constant(1)), "i8")
        for place in (first, t.gep(first, t.mul(steps, t.constant(half)), "i8")):
            prefetch(t, place, self._fetched * CACHE_LINE // 2)

    def _step(self, number: str, weights: list[str]) -> None:
        """32 k: tile `number` of the rows by the panels' weights.

        Tokens of a block come from the second cache, and ask to leave the first to the weights.
        """
        t, load = self._t, "tileloadd64" if self._fetched == STREAM else "tileloaddt164"
        row_stride = (t.constant(TILE_ROW_BYTES), "i64")
        weight_stride = (t.constant(4 * self._target.panel), "i64")
        a = t.gep("%a", t.mul(number, t.constant(PACKED_STEP)), "i8")
        for r in range(self._rows):
            place = (t.gep(a, r * PACKED_TILE, "i8"), "!llvm.ptr")
            emit_unit(t, load, TOKENS[r], place, row_stride)
        for p, v in dict.fromkeys((p, v) for _, p, v in self._places):
            place = (t.gep(weights[p], v * TILE_ROW_BYTES, "i8"), "!llvm.ptr")
            emit_unit(t, "tileloadd64", WEIGHTS[v], place, weight_stride)
            for r in range(self._rows):
                emit_unit(t, "tdpbf16ps", self._sums[r, p, v], TOKENS[r], WEIGHTS[v])


def call_product(
    parts: LinearParts, rows: int, panels: int, fetched: int, values: dict[str, str]
) -> None:
    """Calls the product; `values` by the names of its arguments."""
    args = [(values[name], kind) for name, kind in _args(panels, fetched).items()]
    parts.t.call(_name(rows, panels, fetched), args)


def _args(panels: int, fetched: int) -> dict[str, str]:
    """Names and types of a product's arguments."""
    args = dict(_ARGS)
    if panels > 1:
        args["wstride"] = "i64"
    if fetched != STREAM:
        args["ahead"] = "!llvm.ptr"
    return args


def _name(rows: int, panels: int, fetched: int) -> str:
    return f"product_{rows}_{panels}_{'stream' if fetched == STREAM else fetched}"
