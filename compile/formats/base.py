"""What a weight format must provide, and the arithmetic that formats share."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from buddy_pipeline.compile.formats.activation import Activation, Plain
from buddy_pipeline.compile.mlir_text import CACHE_LINE, Text
from buddy_pipeline.compile.target import Target

#: Bytes of one packed activation row in a cache block over K, by the lanes of a vector: outputs
#: come and go as seldom as the caches allow. A panel of 32 outputs comes from L2 in any case, so
#: that longer blocks only gain (f32, K = 576: 82 % of the peak with 1,536 bytes, 85 with 3,072);
#: narrower panels stay in L1 (f32, K = 1,536: 86 and 81 %).
_BLOCK_BYTES = {16: 3072}
_NARROW_BLOCK_BYTES = 1536
_FEWEST = 32
#: Bytes between packed activation rows beyond a block: rows must not share cache sets.
ROW_PADDING = 64
_BF16_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
#: Rows of one tile of the matrix unit, and pairs of k.
MATRIX_ROWS = 16
#: Bytes ahead of what they read that tiles of few tokens ask memory for. What they do with a line
#: keeps an Intel CPU busy for longer than it looks ahead by itself, the more so the more tokens: it
#: reads 4 % faster with one of f32, 60 with five, 30 with one of Q4_1. A Zen 4 is far enough ahead,
#: and slower when it is asked (a token of Q4_K takes 1.07 times as long, of Q6_K 1.6 times).
_AHEAD = 3072
#: The same for a panel's only tile of more tokens, which reads its weights more slowly (8 to 14
#: tokens, K = 1,536, f32: 1.1 to 1.2 times as fast as when it asks for the next panel).
_FURTHER_AHEAD = 6144
_LOOKS_AHEAD_ITSELF = "znver"
#: A panel's only tile, if it multiplies each weight so often, has time to fetch others beside its
#: own work; with fewer products it would only disturb the stream that it reads.
_FETCHING_PRODUCTS = 7
#: (row, vector of the panel), such as of an accumulator of a tile.
Place = tuple[int, int]


def places(target: Target, rows: int) -> list[Place]:
    """Every accumulator of a register tile of `rows` tokens by one panel, in order."""
    return [(row, v) for row in range(rows) for v in range(target.panel_vectors)]


@dataclass(frozen=True)
class RegisterUse:
    """What a format's inner loop keeps in registers besides its accumulators."""

    temporaries: int = 0  # for each accumulator, such as the integer chain that feeds it
    panel: int = 1  # for each vector of a panel: its weights
    shared: int = 1  # for the whole tile: a broadcast activation, masks
    #: Tiles live in the CPU's matrix unit, which takes panels of bf16 pairs and bf16 activations.
    matrix: bool = False


class WeightFormat(Protocol):
    """One way to keep a matrix in memory and to multiply with it.

    A panel holds `Target.panel` outputs over all of K; the kernel walks K in units of `unit`. With
    `scaled` a panel begins with one f32 an output, by which a finished chain is multiplied.
    """

    @property
    def name(self) -> str:
        """What manifests and symbols call it."""

    @property
    def unit(self) -> int:
        """Steps of K that are packed, read and multiplied together."""

    @property
    def scaled(self) -> bool:
        """Whether each output has one scale over all of K, applied behind the chain."""

    def unit_bytes(self, panel: int) -> int:
        """Bytes of one unit of a packed panel."""

    @property
    def source(self) -> str:
        """What `pack` takes: "f32", "bf16" (as uint16) or "f16" [outputs, K], or the name of a
        row format of `quantised_rows` (uint8 [outputs, bytes])."""

    def from_f32(self, rows: np.ndarray) -> np.ndarray:
        """float32 [outputs, K] as `source`; ValueError saying what cannot be represented."""

    def pack(self, rows: np.ndarray, panels: np.ndarray) -> None:
        """Packs rows of `source` into `panels`, uint8 [panels, bytes].

        `outputs` may end inside the last panel; the rest of that panel is left as it is (zero).
        """

    def reference(self, rows: np.ndarray) -> np.ndarray:
        """The numbers that rows of `source` stand for, float32 [outputs, K]."""

    def activation(self, target: Target) -> Activation:
        """How the format's tiles read activations."""

    def registers(self, target: Target) -> RegisterUse:
        """What bounds the size of a tile."""

    def emit_unit(
        self,
        t: Text,
        target: Target,
        rows: int,
        base: str,
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """Writes one unit of every accumulation chain and returns the new accumulators; also asks
        for weights that come later (see `prefetch_ahead`).

        `rows` are the tokens of the tile, `base` is the address of this unit in the panel, `inputs`
        that of the unit's first activation in row 0 (rows are `row_bytes` apart).
        """

    def emit_values(
        self, t: Text, target: Target, base: str, lane: str, out: str, left: str
    ) -> None:
        """Stores one unit of output `lane` as f32 to `out`, or only its first `left` elements where
        the row ends before. `base` is the address of the unit in the panel."""


def row_bytes(target: Target, activation: Activation) -> int:
    """Bytes from one packed activation row to the next."""
    return activation_bytes(activation, _row_elements(target, activation)) + ROW_PADDING


def depth_step(form: WeightFormat, activation: Activation) -> int:
    """What the depth of a cache block over K is a multiple of: whole units and whole blocks of
    activations, both powers of two."""
    return max(_FEWEST, form.unit, activation.block)


def most_depth(target: Target, form: WeightFormat, activation: Activation) -> int:
    """The greatest depth of one cache block over K."""
    step = depth_step(form, activation)
    return _row_elements(target, activation) // step * step


def _row_elements(target: Target, activation: Activation) -> int:
    """Elements of a packed activation row in one cache block."""
    size = _BLOCK_BYTES.get(target.lanes, _NARROW_BLOCK_BYTES)
    return size // activation.block_bytes * activation.block


def activation_bytes(activation: Activation, elements: int) -> int:
    """Bytes of packed activations, a whole number of blocks."""
    return elements // activation.block * activation.block_bytes


def panel_bytes(form: WeightFormat, depth: int, panel: int) -> int:
    """Bytes of one packed panel of `depth` inputs: scales, then K rounded up to whole units."""
    return head_bytes(form, panel) + -(-depth // form.unit) * form.unit_bytes(panel)


def head_bytes(form: WeightFormat, panel: int) -> int:
    """Bytes of a packed panel before its units."""
    return 4 * panel if form.scaled else 0


def tile_rows(target: Target, form: WeightFormat) -> int:
    """Tokens of one register tile: accumulators fill the registers that the rest leaves free."""
    use, vectors = form.registers(target), target.panel_vectors
    if use.matrix:
        return 2 * MATRIX_ROWS
    free = target.registers - use.panel * vectors - use.shared
    return max(1, free // (vectors * (1 + use.temporaries)))


def prefetch(t: Text, address: str, size: int) -> None:
    """Asks memory for `size` bytes of weights that come later."""
    for line in range(0, size, CACHE_LINE):
        t.prefetch(t.gep(address, line, "i8"))


def fetches_for_itself(target: Target, form: WeightFormat, rows: int) -> bool:
    """Whether a tile of `rows` tokens that is its panel's only one asks for `weights_ahead`."""
    return rows * max(1, form.registers(target).temporaries) >= _FETCHING_PRODUCTS


def weights_ahead(t: Text, target: Target, place: str, panel_size: str) -> str:
    """What a panel's only tile, if it has the time, asks for beside the weights at `place`."""
    further = panel_size if _looks_ahead_itself(target) else t.constant(_FURTHER_AHEAD)
    return t.gep(place, further, "i8")


def prefetch_ahead(
    t: Text, target: Target, form: WeightFormat, rows: int, base: str, parts: int = 1
) -> None:
    """In a tile of few tokens asks for what it reads soon after one of the `parts` of a unit, which
    is at `base`.

    Tiles of more tokens ask for weights by `weights_ahead`, or find them in cache.
    """
    if not (_looks_ahead_itself(target) or fetches_for_itself(target, form, rows)):
        prefetch(t, t.gep(base, _AHEAD, "i8"), form.unit_bytes(target.panel) // parts)


def _looks_ahead_itself(target: Target) -> bool:
    return target.cpu.startswith(_LOOKS_AHEAD_ITSELF)


def accumulate(
    t: Text,
    target: Target,
    rows: int,
    weights: list[list[str]],
    inputs: str,
    accumulators: list[str],
) -> list[str]:
    """Fused multiply-adds of f32 weights and activations: for each k of a unit the vectors of the
    panel."""
    vector = f"vector<{target.lanes}xf32>"
    stride = row_bytes(target, Plain()) // 4
    for k, at_k in enumerate(weights):
        following = []
        activation = ""
        for accumulator, (row, v) in zip(accumulators, places(target, rows), strict=True):
            if v == 0:
                scalar = t.load(t.gep(inputs, row * stride + k), "f32")
                activation = t.broadcast(scalar, vector)
            following.append(t.fma(activation, at_k[v], accumulator, vector))
        accumulators = following
    return accumulators


def accumulate_pairs(
    t: Text,
    target: Target,
    rows: int,
    weights: list[str],
    inputs: str,
    accumulators: list[str],
    stride: int,
) -> list[str]:
    """accumulator += both products of a pair of k, with the CPU's own order and rounding.

    `weights` are the panel's vectors of bf16 pairs, vector<2·lanes x bf16>; activations are bf16,
    their rows `stride` bytes apart.
    """
    lanes = target.lanes
    vector, words = f"vector<{lanes}xf32>", f"vector<{lanes}xi32>"
    halves = f"vector<{2 * lanes}xbf16>"
    following = []
    activation = ""
    for accumulator, (row, v) in zip(accumulators, places(target, rows), strict=True):
        if v == 0:
            pair = t.load(t.gep(inputs, row * stride, "i8"), "i32")
            spread = t.broadcast(pair, words, "i32")
            activation = t.op(f"vector.bitcast {spread} : {words} to {halves}")
        following.append(
            t.op(
                f'llvm.call_intrinsic "{_BF16_DOT}"({accumulator}, {activation}, '
                f"{weights[v]}) : ({vector}, {halves}, {halves}) -> {vector}"
            )
        )
    return following


def interleave(rows: np.ndarray, panels: np.ndarray, group: int) -> None:
    """Packs rows [outputs, K] as [panel][K / group][output][group], the layout of plain numbers.

    `panels` is [panels, K / group, panel, group] of the rows' dtype; K is padded with zeros.
    """
    count, depth = rows.shape
    width = panels.shape[2]
    if depth % group:
        rows = np.pad(rows, ((0, 0), (0, -depth % group)))
    whole = count // width
    steps = panels.shape[1]
    split = rows[: whole * width].reshape(whole, width, steps, group)
    panels[:whole] = split.transpose(0, 2, 1, 3)
    rest = rows[whole * width :]
    if len(rest):
        panels[whole, :, : len(rest)] = rest.reshape(len(rest), steps, group).transpose(1, 0, 2)
