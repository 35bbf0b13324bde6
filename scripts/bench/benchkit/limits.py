"""The machine's limits, measured: read bandwidth and multiply-add peak of a team of threads."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import numpy as np

from benchkit.roofline_kernels import (
    FMA_BF16,
    FMA_F32,
    READS,
    RESULT_BYTES,
    emit_read,
    fma_bf16,
    fma_f32,
    read_round,
)
from buddy_pipeline.compile.codegen import compile_object
from buddy_pipeline.compile.kernels.driver import DRIVER, emit_driver
from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.lowering import lower_kernel
from buddy_pipeline.compile.manifest import StepWord
from buddy_pipeline.compile.target import Target
from buddy_pipeline.ranks.memory_blocks import aligned_zeros, arena

#: Operations of one measurement in each thread: about 10 ms, long against starting a team and short
#: enough to find a moment without other load.
_FMA_FLOPS = 1e9
_BARRIER_WORDS = 16


@dataclass(frozen=True)
class Objects:
    """The compiled loops for one target."""

    target: Target
    images: tuple[bytes, ...]
    flops: dict[str, int]
    """Operations of one round, by the multiply-add loop's symbol."""


@dataclass(frozen=True)
class Limits:
    """The best of several measurements with one team."""

    threads: int
    read_bytes_per_s: float
    f32_flops_per_s: float
    bf16_flops_per_s: float | None
    """None if the CPU has no bf16 dot product."""

    def best(self, other: Limits) -> Limits:
        """The higher of two measurements of one team, limit by limit."""
        bf16 = [x.bf16_flops_per_s for x in (self, other) if x.bf16_flops_per_s is not None]
        return Limits(
            self.threads,
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.f32_flops_per_s, other.f32_flops_per_s),
            max(bf16, default=None),
        )


def compile_loops(target: Target) -> Objects:
    """Compiles the loops in this process: give it a process of its own (MLIR aborts on errors)."""
    loops = [loop for loop in (fma_f32(target), fma_bf16(target)) if loop is not None]
    sources = [(DRIVER, emit_driver(target))]
    sources += [(symbol, emit_read(target, symbol)) for symbol in READS]
    sources += [(loop.symbol, loop.text) for loop in loops]
    images = tuple(compile_object([lower_kernel(text)], [name], target) for name, text in sources)
    return Objects(target, images, {loop.symbol: loop.flops for loop in loops})


class LimitMeter:
    """The loops loaded into this process with data of `megabytes` to read.

    The OpenMP runtime reads its environment when it is loaded: prepare the threads before.
    """

    def __init__(self, objects: Objects, threads: int, megabytes: int) -> None:
        self._objects = objects
        self._threads = threads
        self._library = Library(objects.images, [DRIVER, *READS, *objects.flops])
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        self._driver = kind(self._library.address(DRIVER))
        rounds = (megabytes << 20) // 4 // read_round(objects.target)
        self.data = arena(4 * rounds * read_round(objects.target)).view(np.float32)
        """float32: what is read, on the pages that weights lie on. Ones, so that the sum tells
        whether all of it was."""
        self.data[:] = 1.0
        self._rounds = rounds
        self._results = aligned_zeros((threads * RESULT_BYTES // 4,), np.float32)
        self._factors = aligned_zeros((256,), np.float32)
        self._barrier = aligned_zeros((_BARRIER_WORDS,), np.int64)
        self._record = np.zeros(len(StepWord), np.int64)
        self._record[StepWord.TEAM.value] = threads
        self._record[StepWord.BARRIER.value] = self._barrier.ctypes.data

    def measure(self, repetitions: int) -> Limits:
        """The best of `repetitions` of each loop."""
        read = min(self.read_seconds(symbol) for symbol in READS for _ in range(repetitions))
        peaks = {symbol: self.flops_per_s(symbol, repetitions) for symbol in self._objects.flops}
        return Limits(self._threads, self.data.nbytes / read, peaks[FMA_F32], peaks.get(FMA_BF16))

    def read_seconds(self, symbol: str) -> float:
        """Seconds of one of READS for all data; RuntimeError if the sum says that not all was
        read."""
        seconds = self._run(symbol, self.data.ctypes.data, self._rounds)
        total = float(self._results.sum(dtype=np.float64))
        if abs(total - self.data.size) > 1e-6 * self.data.size:
            raise RuntimeError(f"the reading loop summed {total} ones of {self.data.size}")
        return seconds

    def flops_per_s(self, symbol: str, repetitions: int) -> float:
        """The team's best rate of one multiply-add loop."""
        a_round = self._objects.flops[symbol]
        rounds = int(_FMA_FLOPS / a_round)
        factors = self._factors.ctypes.data
        best = min(self._run(symbol, factors, rounds) for _ in range(repetitions))
        return rounds * a_round * self._threads / best

    def _run(self, symbol: str, data: int, count: int) -> float:
        args = np.array([data, count, self._results.ctypes.data], np.int64)
        call = np.array([self._library.address(symbol), args.ctypes.data], np.int64)
        started = time.perf_counter()
        self._driver(call.ctypes.data, 1, self._record.ctypes.data)
        return time.perf_counter() - started
