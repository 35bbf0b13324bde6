"""What the matrix unit reads: activations packed as tiles, a panel's last weights with zeros."""

from buddy_pipeline.compile.formats.base import MATRIX_ROWS
from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.kernels.linear_parts import LinearParts, ceil_div
from buddy_pipeline.compile.kernels.matrix_tiles import TILE_DEPTH, TILE_ROW_BYTES
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: Bytes of a packed tile of 16 tokens, and of the two of a step of 32 k.
PACKED_TILE = MATRIX_ROWS * TILE_ROW_BYTES
PACKED_STEP = 2 * PACKED_TILE

_PACK_ARGS = [
    ("x", "!llvm.ptr"),
    ("ldx", "i64"),
    ("to", "!llvm.ptr"),
    ("rows", "i64"),
    ("depth", "i64"),
]
_PAD_ARGS = [("w", "!llvm.ptr"), ("to", "!llvm.ptr"), ("depth", "i64")]


def weight_step(target: Target) -> int:
    """Bytes of a panel over a step of 32 k."""
    return 2 * TILE_DEPTH * target.panel


def has_rest(t: Text, depth: str) -> str:
    """Whether `depth` ends inside a step."""
    rest = t.op(f"arith.remui {depth}, {t.constant(TILE_DEPTH)} : i64")
    return t.compare("ne", rest, t.constant(0))


def emit_pack_rows(parts: LinearParts) -> None:
    """`pack_rows(x, ldx, to, rows, depth)`: rows of x rounded to bf16, [32 tokens][step][token][32
    k], and zeros behind the last k. Rows that a last 32 tokens lack are left as they are."""
    t, target = parts.t, parts.target
    with t.function("pack_rows", _PACK_ARGS, private=True):
        zero, one, width = t.constant(0), t.constant(1), t.constant(TILE_DEPTH)
        pair = t.constant(2 * MATRIX_ROWS)
        steps = ceil_div(t, "%depth", TILE_DEPTH)
        whole = t.binary("arith.divui", "%depth", width)
        vector = vm.Lanes(target.lanes)
        with t.loop(zero, "%rows", one) as row:
            x = t.gep("%x", t.mul(row.index, "%ldx"))
            tiles = t.mul(t.binary("arith.divui", row.index, pair), steps)
            line = t.op(f"arith.remui {row.index}, {pair} : i64")
            to = t.gep("%to", t.mul(tiles, t.constant(PACKED_STEP)), "i8")
            to = t.gep(to, t.mul(line, t.constant(TILE_ROW_BYTES)), "i8")

            def copy(source: str, at: str, types: vm.Lanes) -> None:
                value = t.load(source, types.of("f32"))
                half = vm.narrowed(t, value, "bf16", types, target)
                t.store(half, at, types.of("bf16"), 2)

            with t.loop(zero, whole, one) as step:
                source = t.gep(x, t.mul(step.index, width))
                at = t.gep(to, t.mul(step.index, t.constant(PACKED_STEP)), "i8")
                for first in range(0, TILE_DEPTH, target.lanes):
                    copy(t.gep(source, first), t.gep(at, first, "bf16"), vector)
            with t.when(has_rest(t, "%depth")):
                done = t.mul(whole, width)
                source = t.gep(x, done)
                at = t.gep(to, t.mul(whole, t.constant(PACKED_STEP)), "i8")
                left = t.binary("arith.subi", "%depth", done)
                with t.loop(zero, left, one) as k:
                    copy(t.gep(source, k.index), t.gep(at, k.index, "bf16"), vm.Lanes(0))
                with t.loop(left, width, one) as k:
                    t.store(t.constant(0.0, "bf16"), t.gep(at, k.index, "bf16"), "bf16", 2)
        t.line("return")


def emit_pad_weights(parts: LinearParts) -> None:
    """`pad_weights(w, to, depth)`: the weights of the last depth % 32, and zeros."""
    t, target = parts.t, parts.target
    with t.function("pad_weights", _PAD_ARGS, private=True):
        zero, one = t.constant(0), t.constant(1)
        pair_bytes = t.constant(4 * target.panel)
        pairs = ceil_div(t, "%depth", 2)
        whole = t.binary("arith.divui", "%depth", t.constant(TILE_DEPTH))
        first = t.mul(whole, t.constant(TILE_DEPTH // 2))
        rest = t.binary("arith.subi", pairs, first)

        def store(pair: str, value: str, v: int) -> None:
            place = t.gep(t.gep("%to", t.mul(pair, pair_bytes), "i8"), v * target.lanes)
            t.store(value, place, parts.vector, TILE_ROW_BYTES)

        with t.loop(zero, rest, one) as pair:
            source = t.gep("%w", t.mul(t.add(first, pair.index), pair_bytes), "i8")
            for v in range(target.panel_vectors):
                at = t.gep(source, v * target.lanes)
                store(pair.index, t.load(at, parts.vector, TILE_ROW_BYTES), v)
        with t.loop(rest, t.constant(TILE_DEPTH // 2), one) as pair:
            for v in range(target.panel_vectors):
                store(pair.index, t.constant(0.0, parts.vector), v)
        t.line("return")


def call_pack_rows(parts: LinearParts, values: list[str]) -> None:
    """Calls `pack_rows`."""
    parts.call("pack_rows", _PACK_ARGS, values)


def call_pad_weights(parts: LinearParts, values: list[str]) -> None:
    """Calls `pad_weights`."""
    parts.call("pad_weights", _PAD_ARGS, values)
