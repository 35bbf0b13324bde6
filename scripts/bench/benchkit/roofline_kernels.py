"""Loops that do nothing but read memory, or nothing but multiply-add: the machine's two limits.

Emitted and compiled as the product's kernels are. Each is called by every thread of a team through
the stage driver, as `loop(args, step, tid)`, and leaves a sum so that no work can be left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

from buddy_pipeline.compile.formats.base import MATRIX_ROWS, prefetch
from buddy_pipeline.compile.kernels.matrix_tiles import (
    SUMS,
    TILE_DEPTH,
    TOKENS,
    WEIGHTS,
    emit_configuration,
    emit_unit,
)
from buddy_pipeline.compile.kernels.step import step_word, thread_share
from buddy_pipeline.compile.manifest import StepWord
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.compile.target import Target

#: The reading loops, and how many bytes ahead of its loads each asks for memory: which is faster
#: depends on how far the CPU looks ahead by itself.
READS = {"roofline_read": 0, "roofline_read_ahead": 3072}
FMA_F32 = "roofline_fma_f32"
FMA_BF16 = "roofline_fma_bf16"

#: Bytes of the result that each thread writes: one vector of any target, on lines of its own.
RESULT_BYTES = 256
#: Vectors read in one round of the reading loop, each added to a sum of its own: enough loads under
#: way to fill the core's miss buffers.
_VECTORS = 8
#: Registers that the multiply-add loops leave free for the two factors and the loop itself.
_SPARE_REGISTERS = 4
_ARGS = [("args", "!llvm.ptr"), ("step", "!llvm.ptr"), ("tid", "i64")]
_WORDS_DATA, _WORDS_COUNT, _WORDS_RESULT = 0, 1, 2


@dataclass(frozen=True)
class FmaLoop:
    """A multiply-add loop: its symbol, its MLIR, and the operations of one round."""

    symbol: str
    text: str
    flops: int


def read_round(target: Target) -> int:
    """f32 elements of one round of the reading loop; a thread reads whole rounds."""
    return _VECTORS * target.lanes


def emit_read(target: Target, symbol: str) -> str:
    """One of READS.

    Args: address of f32 data, its count of rounds (see `read_round`), address of the results. Each
    thread reads its contiguous share of the rounds.
    """
    t = Text()
    vector = f"vector<{target.lanes}xf32>"
    ahead = READS[symbol]
    with t.function(symbol, _ARGS):
        data = t.word("%args", _WORDS_DATA, "!llvm.ptr")
        low, high = thread_share(
            t, t.word("%args", _WORDS_COUNT), "%tid", step_word(t, StepWord.TEAM)
        )
        zero = t.constant(0.0, vector)
        width = t.constant(read_round(target))
        with t.loop(low, high, t.constant(1), [(zero, vector)] * _VECTORS) as loop:
            base = t.gep(data, t.mul(loop.index, width))
            if ahead:
                prefetch(t, t.gep(base, ahead, "i8"), 4 * read_round(target))
            for number, total in enumerate(loop.carried):
                value = t.load(t.gep(base, number * target.lanes), vector, target.vector_bits // 8)
                loop.next.append(t.binary("arith.addf", total, value, vector))
        _store_sum(t, loop.results, vector, target)
    return str(t)


def fma_f32(target: Target) -> FmaLoop:
    """f32 fused multiply-adds on as many independent chains as registers allow."""
    vector = f"vector<{target.lanes}xf32>"
    chains = target.registers - _SPARE_REGISTERS

    def step(t: Text, accumulator: str, left: str, right: str) -> str:
        return t.fma(left, right, accumulator, vector)

    text = _emit_fma(FMA_F32, target, vector, chains, step)
    return FmaLoop(FMA_F32, text, chains * target.lanes * 2)


def fma_bf16(target: Target) -> FmaLoop | None:
    """Products of bf16 pairs added to f32, on independent chains, in the matrix unit if there is
    one; None if the CPU has no such instruction."""
    if target.bf16_tiles:
        return _fma_tiles(target)
    if not target.bf16_dot:
        return None
    vector = f"vector<{target.lanes}xf32>"
    pairs = f"vector<{target.lanes * 2}xbf16>"
    chains = target.registers - _SPARE_REGISTERS
    intrinsic = f"llvm.x86.avx512bf16.dpbf16ps.{target.vector_bits}"

    def step(t: Text, accumulator: str, left: str, right: str) -> str:
        return t.op(
            f'llvm.call_intrinsic "{intrinsic}"({accumulator}, {left}, {right}) : '
            f"({vector}, {pairs}, {pairs}) -> {vector}"
        )

    text = _emit_fma(FMA_BF16, target, pairs, chains, step)
    return FmaLoop(FMA_BF16, text, chains * target.lanes * 4)


def _fma_tiles(target: Target) -> FmaLoop:
    """Two tiles by two into four sums, each 16 x 16 outputs over 32 k, as the linear kernel does.

    The arguments are those of `_emit_fma`; all tiles hold what lies at the factors' address.
    """
    t = Text()

    def unit(instruction: str, *operands: int | tuple[str, str]) -> None:
        emit_unit(t, instruction, *operands)

    with t.function(FMA_BF16, _ARGS):
        data = (t.word("%args", _WORDS_DATA, "!llvm.ptr"), "!llvm.ptr")
        result = t.word("%args", _WORDS_RESULT, "!llvm.ptr")
        place = t.gep(result, t.mul("%tid", t.constant(RESULT_BYTES)), "i8")
        # The shapes are written where the result will be: a thread has no other memory.
        emit_configuration(t, place, t.constant(2 * MATRIX_ROWS))
        unit("ldtilecfg", (place, "!llvm.ptr"))
        for register in (*SUMS, *TOKENS, *WEIGHTS):
            unit("tileloadd64", register, data, (t.constant(0), "i64"))
        rounds = t.word("%args", _WORDS_COUNT)
        with t.loop(t.constant(0), rounds, t.constant(1)):
            for number, total in enumerate(SUMS):
                unit("tdpbf16ps", total, TOKENS[number // 2], WEIGHTS[number % 2])
        unit("tilestored64", SUMS[0], (place, "!llvm.ptr"), (t.constant(0), "i64"))
        t.line('llvm.call_intrinsic "llvm.x86.tilerelease"() : () -> ()')
        t.line("return")
    return FmaLoop(FMA_BF16, str(t), 2 * len(SUMS) * MATRIX_ROWS**2 * TILE_DEPTH)


def _emit_fma(
    symbol: str,
    target: Target,
    factors: str,
    chains: int,
    step: Callable[[Text, str, str, str], str],
) -> str:
    """Args: address of two vectors of `factors`, rounds, address of the results.

    The factors come from memory, so that the compiler knows nothing about them.
    """
    t = Text()
    vector = f"vector<{target.lanes}xf32>"
    width = target.vector_bits // 8
    with t.function(symbol, _ARGS):
        data = t.word("%args", _WORDS_DATA, "!llvm.ptr")
        left = t.load(data, factors, width)
        right = t.load(t.gep(data, target.lanes), factors, width)
        starts = [t.constant(float(number), vector) for number in range(chains)]
        rounds = t.word("%args", _WORDS_COUNT)
        carried = [(start, vector) for start in starts]
        with t.loop(t.constant(0), rounds, t.constant(1), carried) as loop:
            loop.next = [step(t, chain, left, right) for chain in loop.carried]
        _store_sum(t, loop.results, vector, target)
    return str(t)


def _store_sum(t: Text, parts: list[str], vector: str, target: Target) -> None:
    total = parts[0]
    for part in parts[1:]:
        total = t.binary("arith.addf", total, part, vector)
    result = t.word("%args", _WORDS_RESULT, "!llvm.ptr")
    place = t.gep(result, t.mul("%tid", t.constant(RESULT_BYTES)), "i8")
    t.store(total, place, vector, target.vector_bits // 8)
    t.line("return")
