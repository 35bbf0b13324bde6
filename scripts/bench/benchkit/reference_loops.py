"""The machine's limits by other means, to hold our own loops against: NumPy, and C with gcc."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

#: Rows of the square matrices that NumPy multiplies: large enough for its library's best rate.
_MATRIX = 1536
_FMA_ROUNDS = 40_000_000
_LANES = 16
_READS = ("read_all", "read_all_ahead")
#: Plain C on vectors of 16 floats, which gcc splits for narrower CPUs.
_SOURCE = """
#include <stddef.h>
typedef float vector __attribute__((vector_size(64)));
static inline float sum(const vector *data, size_t count, size_t ahead) {
  vector s[8] = {0};
  for (size_t i = 0; i + 8 <= count; i += 8) {
    for (int j = 0; j < 8 && ahead; j++)
      __builtin_prefetch((const char *)(data + i + j) + ahead, 0, 2);
    asm volatile("" ::: "memory");  // or gcc asks after it has read
    for (int j = 0; j < 8; j++) s[j] += data[i + j];
  }
  vector t = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
  float total = 0;
  for (int j = 0; j < 16; j++) total += t[j];
  return total;
}
float read_all(const vector *data, size_t count) { return sum(data, count, 0); }
float read_all_ahead(const vector *data, size_t count) { return sum(data, count, 3072); }
float fma_all(const vector *factors, size_t rounds) {
  vector s[CHAINS], a = factors[0], b = factors[1];
  for (int j = 0; j < CHAINS; j++) s[j] = a * (float)j;
  for (size_t i = 0; i < rounds; i += CHAINS)
    for (int j = 0; j < CHAINS; j++) s[j] = s[j] * a + b;
  vector t = s[0];
  for (int j = 1; j < CHAINS; j++) t += s[j];
  return t[0];
}
"""


def numpy_read(data: np.ndarray, repetitions: int) -> float:
    """Bytes/s of NumPy's sum of `data`, float32 [n], which runs on one thread."""
    return data.nbytes / _best(lambda: np.add.reduce(data), repetitions)


def numpy_flops(repetitions: int) -> float:
    """FLOP/s of NumPy's f32 matrix product, on as many threads as its library takes."""
    left = np.ones((_MATRIX, _MATRIX), np.float32)
    right = np.ones((_MATRIX, _MATRIX), np.float32)
    return 2 * _MATRIX**3 / _best(lambda: left @ right, repetitions)


class CLoops:
    """The same two loops in C."""

    def __init__(self, vector_bits: int) -> None:
        # More chains than latency needs, few enough for the registers that 64 bytes take there.
        chains = 12 if vector_bits == 512 else 6
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "loops.c", Path(folder) / "loops.so"
            source.write_text(_SOURCE)
            # Sums in any order, but not -ffast-math: gcc links it with code that makes the process
            # that loads the library flush subnormal numbers to zero.
            sums = ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"]
            options = ["-O3", "-march=native", *sums, "-shared", "-fPIC"]
            options.append(f"-DCHAINS={chains}")
            subprocess.run(["gcc", *options, "-o", library, source], check=True)
            self._library = ctypes.CDLL(str(library))
        for name in (*_READS, "fma_all"):
            function = getattr(self._library, name)
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_float

    def read(self, data: np.ndarray, threads: int, repetitions: int) -> float:
        """Bytes/s of reading `data`, float32 [n] aligned to 64 bytes, in equal parts."""
        parts = np.array_split(data[: data.size // (threads * 128) * threads * 128], threads)
        jobs = [(part.ctypes.data, part.size // _LANES) for part in parts]
        seconds = min(self._best_of_threads(name, jobs, repetitions) for name in _READS)
        return data.nbytes / seconds

    def flops(self, threads: int, repetitions: int) -> float:
        """FLOP/s of f32 multiply-adds."""
        memory = np.zeros(64, np.float32)
        factors = memory.ctypes.data + -memory.ctypes.data % 64
        jobs = [(factors, _FMA_ROUNDS)] * threads
        seconds = self._best_of_threads("fma_all", jobs, repetitions)
        return threads * _FMA_ROUNDS * _LANES * 2 / seconds

    def _best_of_threads(self, name: str, jobs: list[tuple[int, int]], repetitions: int) -> float:
        function = getattr(self._library, name)
        with ThreadPoolExecutor(len(jobs)) as pool:
            return _best(lambda: list(pool.map(lambda job: function(*job), jobs)), repetitions)


def c_loops(vector_bits: int) -> CLoops | None:
    """The C loops for a CPU with vectors of `vector_bits`, or None on a machine without gcc."""
    return CLoops(vector_bits) if shutil.which("gcc") else None


def _best(run: Callable[[], object], repetitions: int) -> float:
    """Seconds of the fastest of `repetitions`."""
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
