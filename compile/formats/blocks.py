"""GGUF's block formats: small integers in blocks that share scales, computed on as they are.

A packed panel is a row of units, one for each block of the file's rows (32 or 256 elements). A unit
is its blocks of 32 elements, each [words][panel] of 32-bit words (see `block_layout`) and [scales]
[panel] of 8 bits; at the end of the unit come its own scales, [halves][panel] of 16 bits.

A weight is scale · (code - zero) + minimum. All products are exact in float32, so that every order
of evaluation gives the same number, which is that of the reference implementation.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from buddy_pipeline.compile.formats.activation import Activation, Plain
from buddy_pipeline.compile.formats.base import RegisterUse, accumulate, places, prefetch_ahead
from buddy_pipeline.compile.formats.block_column import Column, groups_of_run
from buddy_pipeline.compile.formats.block_dot import BlockDot
from buddy_pipeline.compile.formats.block_layout import (
    BLOCK,
    GROUP,
    GROUPS,
    Fields,
    codes_of,
    interleave_units,
)
from buddy_pipeline.compile.formats.integer_activation import IntegerBlocks
from buddy_pipeline.compile.formats.integer_dot import Codes, integer_dot
from buddy_pipeline.compile.kernels.vector_math import Lanes
from buddy_pipeline.compile.mlir_text import Loop, Text
from buddy_pipeline.compile.target import Target

#: What follows the name of a block format, by the bits of its activations.
ACTIVATION_SUFFIXES = {8: "", 16: "_a16", 32: "_exact"}


@dataclass(frozen=True)
class BlockFormat(ABC):
    """What the block formats share; each says how its file's blocks come apart, and its scales.

    With activations of 32 bits, and on CPUs that cannot multiply bytes, weights are decoded to f32
    in registers and multiplied with f32 activations in one chain over k: bit for bit the result of
    the format "f32" on the dequantised weights. Otherwise activations are blocks of integers of 8
    or 16 bits (see `IntegerBlocks`), and each chain gets scale · Σ code · activation, a number a
    run of codes, in the order of the runs.
    """

    activation_bits: int = 8

    scaled: ClassVar[bool] = False
    source: ClassVar[str]
    file_bytes: ClassVar[int]  # of one block of the file
    blocks: ClassVar[int] = 1  # of 32 elements in one block of the file
    bits: ClassVar[int]  # of a code: 4, 5, 6 or 8
    signed: ClassVar[bool] = False
    zero: ClassVar[int] = 0
    runs: ClassVar[int] = 1  # scales of a block of 32
    scales: ClassVar[int] = 0  # small numbers stored for a block of 32
    halves: ClassVar[int] = 1  # 16-bit ones stored for a unit
    has_minimum: ClassVar[bool] = False

    @abstractmethod
    def fields(self, blocks: np.ndarray) -> Fields:
        """Takes blocks as stored apart, uint8 [outputs, units, file_bytes]."""

    @abstractmethod
    def scale(self, fields: Fields) -> np.ndarray:
        """float32 [outputs, units, blocks of 32, runs]."""

    def minimum(self, fields: Fields) -> np.ndarray:
        """float32 [outputs, units, blocks of 32], for formats that have one."""
        raise NotImplementedError

    @abstractmethod
    def emit_scale(self, column: Column, run: int) -> str:
        """`scale` of one run of a block."""

    def emit_minimum(self, column: Column) -> str:
        """`minimum` of a block."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """See `WeightFormat.name`."""
        return self.source + ACTIVATION_SUFFIXES[self.activation_bits]

    @property
    def unit(self) -> int:
        """Elements of one block of the file."""
        return self.blocks * BLOCK

    def unit_bytes(self, panel: int) -> int:
        """See `WeightFormat.unit_bytes`."""
        return self.blocks * self._block_bytes(panel) + 2 * self.halves * panel

    def _block_bytes(self, panel: int) -> int:
        return (4 * self.bits + self.scales) * panel

    def from_f32(self, rows: np.ndarray) -> np.ndarray:
        """Blocks come from files."""
        raise ValueError(f"is not in {self.source} and cannot be made so here: use its own type")

    def pack(self, rows: np.ndarray, panels: np.ndarray) -> None:
        """See `WeightFormat.pack`; rows are uint8 [outputs, bytes], as stored."""
        units = rows.shape[1] // self.file_bytes
        packed = panels.reshape(len(panels), units, -1)
        panel = packed.shape[2] // self.unit_bytes(1)
        fields = self.fields(rows.reshape(len(rows), units, self.file_bytes))
        words_bytes, block_bytes = 4 * self.bits * panel, self._block_bytes(panel)
        for block in range(self.blocks):
            place = packed[..., block * block_bytes : (block + 1) * block_bytes]
            words = place[..., :words_bytes].view(np.uint32)
            interleave_units(fields.words[:, :, block], words, panel)
            if fields.scales is not None:
                interleave_units(fields.scales[:, :, block], place[..., words_bytes:], panel)
        halves = packed[..., self.blocks * block_bytes :].view(np.uint16)
        interleave_units(fields.halves, halves, panel)

    def reference(self, rows: np.ndarray) -> np.ndarray:
        """See `WeightFormat.reference`."""
        fields = self.fields(rows.reshape(len(rows), -1, self.file_bytes))
        codes = codes_of(fields.words, self.bits, self.runs)
        numbers = (codes.view(np.int8) if self.signed else codes).astype(np.float32) - self.zero
        runs = numbers.reshape(*numbers.shape[:-1], self.runs, -1)
        with np.errstate(invalid="ignore", over="ignore"):
            values = (self.scale(fields)[..., None] * runs).reshape(numbers.shape)
            if self.has_minimum:
                values += self.minimum(fields)[..., None]
        return values.reshape(len(rows), -1)

    def activation(self, target: Target) -> Activation:
        """Integers where they are wanted and the CPU multiplies bytes."""
        dot = None if self.activation_bits == 32 else integer_dot(target)
        if dot is None:
            return Plain()
        return IntegerBlocks(
            parts=self.activation_bits // 8,
            bias=self.zero + dot.offset(self._codes()),
            scaled=self.has_minimum,
            run=BLOCK // self.runs,
        )

    def registers(self, target: Target) -> RegisterUse:
        """See `WeightFormat.registers`."""
        activation = self.activation(target)
        if isinstance(activation, IntegerBlocks):
            return RegisterUse(temporaries=activation.parts, panel=1, shared=2)
        # The word, scale and weight of each vector; an activation and masks.
        return RegisterUse(panel=3, shared=3)

    def _codes(self) -> Codes:
        return Codes(largest=1 << (self.bits - self.signed), signed=self.signed)

    def emit_unit(
        self,
        t: Text,
        target: Target,
        rows: int,
        base: str,
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """See `WeightFormat.emit_unit`."""
        activation = self.activation(target)
        vectors = range(target.panel_vectors)

        def block(number: str, chains: list[str]) -> list[str]:
            columns = [self._column(t, target, base, number, v * target.lanes) for v in vectors]
            step = BLOCK // activation.block * activation.block_bytes
            at = t.gep(inputs, t.mul(number, t.constant(step)), "i8")
            offset = t.mul(number, t.constant(self._block_bytes(target.panel)))
            prefetch_ahead(t, target, self, rows, t.gep(base, offset, "i8"), self.blocks)
            if not isinstance(activation, IntegerBlocks):
                return self._emit_products(t, target, rows, columns, at, chains)
            return self._emit_dots(t, target, rows, columns, at, chains)

        if self.blocks == 1:
            return block(t.constant(0), accumulators)
        carried = [(a, f"vector<{target.lanes}xf32>") for a in accumulators]
        with t.loop(t.constant(0), t.constant(self.blocks), t.constant(1), carried) as loop:
            loop.next = block(loop.index, loop.carried)
        return loop.results

    def _column(self, t: Text, target: Target, unit: str, block: str, first: int) -> Column:
        """A vector of outputs from number `first` of a panel on, of one block of a unit."""
        panel = target.panel
        start = t.gep(unit, t.mul(block, t.constant(self._block_bytes(panel))), "i8")
        end = t.gep(unit, self.blocks * self._block_bytes(panel), "i8")
        return Column(
            t,
            Lanes(target.lanes),
            panel,
            words=t.gep(start, first, "i32"),
            scales=t.gep(start, 4 * self.bits * panel + first, "i8"),
            halves=t.gep(end, first, "f16"),
        )

    def _emit_dots(
        self,
        t: Text,
        target: Target,
        rows: int,
        columns: list[Column],
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """One block on int8."""
        activation, dot = self.activation(target), integer_dot(target)
        assert isinstance(activation, IntegerBlocks) and dot is not None
        f = f"vector<{target.lanes}xf32>"
        block = BlockDot(t, target, activation, dot, rows, inputs)
        chains = dict(zip(places(target, rows), accumulators, strict=True))

        def words(group: int) -> list[str]:
            return [self._codes_of(column, t.constant(group)) for column in columns]

        for run in range(self.runs):
            scales = [self.emit_scale(column, run) for column in columns]
            groups = groups_of_run(run, self.bits, self.runs)
            totals = block.totals(self._codes(), groups, words, len(columns), run)
            for (row, v), total in totals.items():
                both = t.binary("arith.mulf", scales[v], block.scale(row), f)
                chains[row, v] = t.fma(total, both, chains[row, v], f)
        if self.has_minimum:
            minima = [self.emit_minimum(column) for column in columns]
            for row in range(rows):
                total = block.scaled_sum(row)
                for v, least in enumerate(minima):
                    chains[row, v] = t.fma(least, total, chains[row, v], f)
        return list(chains.values())

    def _emit_products(
        self,
        t: Text,
        target: Target,
        rows: int,
        columns: list[Column],
        inputs: str,
        accumulators: list[str],
    ) -> list[str]:
        """One block on f32, weight after weight."""
        minima = [self._minimum(column) for column in columns]
        vector = f"vector<{target.lanes}xf32>"
        for run in range(self.runs):
            scales = [self.emit_scale(column, run) for column in columns]
            with self._groups(t, run, [(a, vector) for a in accumulators]) as groups:
                values = [
                    self._values(column, groups.index, scale, minimum)
                    for column, scale, minimum in zip(columns, scales, minima, strict=True)
                ]
                weights = [list(at_k) for at_k in zip(*values, strict=True)]
                at = t.gep(inputs, t.mul(groups.index, t.constant(GROUP)))
                groups.next = accumulate(t, target, rows, weights, at, groups.carried)
            accumulators = groups.results
        return accumulators

    def emit_values(
        self, t: Text, target: Target, base: str, lane: str, out: str, left: str
    ) -> None:
        """See `WeightFormat.emit_values`; a row may end inside a unit."""
        with t.loop(t.constant(0), t.constant(self.blocks), t.constant(1)) as block:
            column = self._column(t, target, base, block.index, 0).output(lane)
            first = t.mul(block.index, t.constant(BLOCK))
            minimum = self._minimum(column)
            for run in range(self.runs):
                scale = self.emit_scale(column, run)
                with self._groups(t, run) as groups:
                    values = self._values(column, groups.index, scale, minimum)
                    group = t.add(first, t.mul(groups.index, t.constant(GROUP)))
                    for k, value in enumerate(values):
                        element = t.add(group, t.constant(k))
                        with t.when(t.compare("ugt", left, element)):
                            t.store(value, t.gep(out, element), "f32")

    def _groups(
        self, t: Text, run: int, carried: Sequence[tuple[str, str]] = ()
    ) -> AbstractContextManager[Loop]:
        """A loop over the groups of a run, in the order of k."""
        each = GROUPS // self.runs
        low, high = t.constant(run * each), t.constant((run + 1) * each)
        return t.loop(low, high, t.constant(1), carried)

    def _codes_of(self, column: Column, group: str) -> str:
        return column.codes(group, self.bits, self.runs)

    def _minimum(self, column: Column) -> str | None:
        return self.emit_minimum(column) if self.has_minimum else None

    def _values(self, column: Column, group: str, scale: str, minimum: str | None) -> list[str]:
        """The four weights of a group as f32."""
        t, f, i = column.t, column.types.of("f32"), column.types.of("i32")
        codes = self._codes_of(column, group)
        values = []
        for k in range(GROUP):
            code = column.code(codes, k, self.signed)
            if self.zero:
                code = t.binary("arith.subi", code, t.constant(self.zero, i), i)
            number = t.op(f"arith.sitofp {code} : {i} to {f}")
            if minimum is None:
                values.append(t.binary("arith.mulf", scale, number, f))
            else:
                values.append(t.fma(scale, number, minimum, f))
        return values
