"""Lowers, compiles, loads and calls one kernel on NumPy arrays.

Memory that a kernel must not depend on (scratch, row padding, cache positions nobody has written)
is filled with NaN, and memory that it must not write is checked to be as before.
"""

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from buddy_pipeline.compile.codegen import compile_object
from buddy_pipeline.compile.formats import FORMATS, WeightFormat
from buddy_pipeline.compile.formats.base import panel_bytes
from buddy_pipeline.compile.host_features import host_features
from buddy_pipeline.compile.kernels import attention, driver, embedding, experts, linear, top_k
from buddy_pipeline.compile.kernels.attention_shape import AttentionShape, partial_bytes
from buddy_pipeline.compile.kernels.linear_outputs import EPILOGUE_SIGNATURE
from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.lowering import lower_kernel
from buddy_pipeline.compile.manifest import KV_BLOCK, KV_SPAN, SPLIT_UNITS, KvLayer, StepWord
from buddy_pipeline.compile.target import Target, host_target, named_target
from buddy_pipeline.ranks.kv_cache import KvCache
from buddy_pipeline.ranks.memory_blocks import aligned_zeros

#: Unit roundoff of float32.
ROUNDOFF = 2.0**-24

#: Cached elements as NumPy sees them; all bits of a 16-bit word but the sign are a NaN in bf16 and
#: in f16, and four bytes of ones are a NaN as a scale.
_CACHED = {"f32": np.float32, "bf16": np.uint16, "f16": np.uint16, "int8": np.uint8}
_CTYPES = {"!llvm.ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "f32": ctypes.c_float}

Arguments = Sequence[Any]


def runnable_targets() -> list[Any]:
    """Parameters for a test that runs code: the x86-64 levels that this CPU has, and the host.

    A level with the host's vectors gives nearly the host's code: it runs every night only.
    """
    features = host_features()
    needs = {
        "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
        "x86-64-v3": ("avx2", "fma", "bmi2", "f16c"),
        "host": (),
    }
    found = []
    for name, wanted in needs.items():
        target, marks = named_target(name), []
        if not all(features.get(f) for f in wanted):
            marks.append(pytest.mark.skip(reason=f"this CPU is no {name}"))
        if target != host_target() and target.vector_bits == host_target().vector_bits:
            marks.append(pytest.mark.slow)
        found.append(pytest.param(target, id=name, marks=marks))
    return found


@functools.cache
def kernel_object(text: str, symbol: str, target: Target) -> bytes:
    """The object file of a module that an emitter wrote."""
    return compile_object([lower_kernel(text)], [symbol], target)


@functools.cache
def load(
    text: str,
    symbol: str,
    target: Target,
    kinds: tuple[str, ...],
    called: tuple[tuple[str, str], ...] = (),
) -> Callable[..., None]:
    """A kernel as a function of arrays, integers and floats; None is a null pointer.

    `called` are the kernels that it calls: text and symbol of each."""
    objects = [
        kernel_object(text, symbol, target),
        *(kernel_object(other, name, target) for other, name in called),
        kernel_object(driver.emit_driver(target), driver.DRIVER, target),
    ]
    library = Library(objects, [symbol])
    types = [_CTYPES[kind] for kind in kinds]
    function = ctypes.CFUNCTYPE(None, *types)(library.address(symbol))

    def call(*arguments: Any) -> None:
        assert library is not None  # lives as long as the function does
        plain = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments]
        function(*plain)

    return call


def in_team(team: int, work: Callable[[int], None]) -> None:
    """Runs `work(tid)` on a team of threads at once; ctypes calls leave the interpreter lock."""
    threads = [threading.Thread(target=work, args=(tid,)) for tid in range(1, team)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()


def aligned(shape: tuple[int, ...], value: float = np.nan) -> np.ndarray:
    """An array of float32 aligned as kernels expect, filled with `value`."""
    result = aligned_zeros(shape, np.float32)
    result.fill(value)
    return result


def row_stride(elements: int) -> int:
    """Elements from one row of an activation to the next, with at least one of padding."""
    return elements // 32 * 32 + 32


def rows_of(array: np.ndarray, stride: int | None = None) -> np.ndarray:
    """A copy of activations [tokens, elements] with NaN behind every row."""
    result = aligned((len(array), stride or row_stride(array.shape[1])))
    result[:, : array.shape[1]] = array
    return result


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 numbers rounded to the nearest of "f32", "bf16" or "f16", ties to even, or in "int8"
    blocks of 32 along the last axis to multiples of their largest / 127."""
    if dtype == "f32":
        return values
    if dtype == "int8":
        return _int8_blocks(values)
    if dtype == "f16":
        return values.astype(np.float16).astype(np.float32)
    return (bf16_bits(values).astype(np.uint32) << 16).view(np.float32)


def _int8_blocks(values: np.ndarray) -> np.ndarray:
    result = np.empty_like(values)
    for first in range(0, values.shape[-1], 32):
        block = values[..., first : first + 32]
        largest = np.abs(block).max(axis=-1, keepdims=True)
        # A product of two float32 is exact in float64, so this rounds once, as the kernel does.
        inverse = (np.float32(127) / largest).astype(np.float64)
        whole = np.rint(block.astype(np.float64) * inverse)
        result[..., first : first + 32] = whole.astype(np.float32) * (largest / np.float32(127))
    return result


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 numbers, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, upper).astype(np.uint16)


def panels_of(rows: np.ndarray, depth: int, target: Target, form: WeightFormat) -> np.ndarray:
    """Rows of `depth` elements, as the format packs them, as panels."""
    count = -(-len(rows) // target.panel)
    panels = aligned_zeros((count, panel_bytes(form, depth, target.panel)), np.uint8)
    form.pack(rows, panels)
    return panels


def run_linear(
    target: Target,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    team: int = 1,
    form: str = "f32",
) -> np.ndarray:
    """x [tokens, inputs] · weightᵀ [outputs, inputs] + bias through the linear kernel."""
    return run_linear_rows(target, x, FORMATS[form].from_f32(weight), bias, team, form)


def run_linear_rows(
    target: Target,
    x: np.ndarray,
    rows_stored: np.ndarray,
    bias: np.ndarray | None = None,
    team: int = 1,
    form: str = "f32",
    epilogue: "Epilogue | None" = None,
) -> np.ndarray:
    """The same on weights in the format's own type; with an epilogue, what that was given."""
    tokens, depth = x.shape
    outputs = len(rows_stored)
    kernel = _linear_kernel(target, form)
    packed = panels_of(rows_stored, depth, target, FORMATS[form])
    width = packed.shape[0] * target.panel
    padded_bias = None
    if bias is not None:
        padded_bias = aligned((width,), 0.0)
        padded_bias[:outputs] = bias
    rows = rows_of(x)
    out = aligned((tokens + 1, row_stride(width)), 7.0)
    size = linear.linear_scratch_bytes(target, FORMATS[form], depth) // 4

    def work(tid: int) -> None:
        scratch = aligned((size + 16,))
        kernel(
            rows,
            rows.shape[1],
            out,
            out.shape[1],
            packed,
            padded_bias,
            tokens,
            depth,
            len(packed),
            1 if epilogue is None else epilogue.group,
            None if epilogue is None else epilogue.address,
            CONTEXT,
            tid,
            team,
            scratch,
        )
        assert np.isnan(scratch[size:]).all(), "wrote behind its scratch"

    in_team(team, work)
    assert (out[:, width:] == 7.0).all(), "wrote behind a row"
    assert (out[tokens:] == 7.0).all(), "wrote behind the last row"
    if epilogue is not None:
        return epilogue.seen()[:, :outputs]
    return out[:tokens, :outputs]


#: What an epilogue is given first, as it came.
CONTEXT = 0x123456789


class Epilogue:
    """An epilogue of a linear that keeps what it is given, and when nothing it has is wrong."""

    def __init__(self, target: Target, tokens: int, panels: int, group: int) -> None:
        self.group = group
        self._width = group * target.panel
        self._values = np.zeros((tokens, panels * target.panel), np.float32)
        self._calls = np.zeros((tokens, panels // group), int)
        self._contexts: set[int] = set()
        kinds = [_CTYPES[kind] for _, kind in EPILOGUE_SIGNATURE]
        self._function = ctypes.CFUNCTYPE(None, *kinds)(self._call)
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value

    def _call(
        self, context: int, outputs: int, stride: int, row: int, rows: int, group: int, groups: int
    ) -> None:
        width = groups * self._width
        memory = (ctypes.c_float * ((rows - 1) * stride + width)).from_address(outputs)
        given = np.lib.stride_tricks.as_strided(
            np.frombuffer(memory, np.float32), (rows, width), (4 * stride, 4)
        )
        first = group * self._width
        self._values[row : row + rows, first : first + width] = given
        self._calls[row : row + rows, group : group + groups] += 1
        self._contexts.add(context)

    def seen(self) -> np.ndarray:
        """The outputs of all tokens; checks that each came once."""
        assert (self._calls == 1).all() and self._contexts == {CONTEXT}
        return self._values


@functools.cache
def _linear_kernel(target: Target, form: str) -> Callable[..., None]:
    kinds = tuple(kind for _, kind in linear.SIGNATURE)
    text = linear.emit_linear(target, FORMATS[form])
    return load(text, linear.linear_name(FORMATS[form]), target, kinds)


def run_embedding(
    target: Target, ids: np.ndarray, table: np.ndarray, team: int = 1, form: str = "f32"
) -> np.ndarray:
    """table [vocabulary, depth] [ids] through the embedding kernel."""
    rows = FORMATS[form].from_f32(table)
    return run_embedding_rows(target, ids, rows, table.shape[1], team, form)


def run_embedding_rows(
    target: Target, ids: np.ndarray, rows: np.ndarray, depth: int, team: int, form: str
) -> np.ndarray:
    """The same on a table in the format's own type."""
    kernel = _embedding_kernel(target, form)
    packed = panels_of(rows, depth, target, FORMATS[form])
    out = aligned((len(ids) + 1, row_stride(depth)), 7.0)

    def work(tid: int) -> None:
        kernel(ids, 1, packed, out, out.shape[1], len(ids), depth, tid, team)

    in_team(team, work)
    assert (out[:, depth:] == 7.0).all() and (out[len(ids) :] == 7.0).all()
    return out[: len(ids), :depth]


@functools.cache
def _embedding_kernel(target: Target, form: str) -> Callable[..., None]:
    kinds = tuple(kind for _, kind in embedding.SIGNATURE)
    text = embedding.emit_embedding(target, FORMATS[form])
    return load(text, embedding.embedding_name(FORMATS[form]), target, kinds)


def run_experts(
    target: Target,
    x: np.ndarray,
    choice: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    team: int = 1,
    form: str = "f32",
) -> np.ndarray:
    """x [tokens, rows, inputs] (of one row, or one for each choice) through the experts kernel with
    choice [tokens, choices], weight [experts, outputs, inputs] and bias [experts, outputs] to
    [tokens, choices, outputs]."""
    (tokens, rows, depth), outputs = x.shape, weight.shape[1]
    stored = FORMATS[form]
    packed = np.concatenate(
        [panels_of(stored.from_f32(matrix), depth, target, stored) for matrix in weight]
    )
    memory = aligned_zeros(packed.shape, np.uint8)
    memory[:] = packed
    padded_bias = None
    if bias is not None:
        width = len(packed) // len(weight) * target.panel
        padded_bias = aligned((len(weight), width), 0.0)
        padded_bias[:, :outputs] = bias
    lines = rows_of(x.reshape(tokens, -1))
    chosen = aligned_zeros((tokens, choice.shape[1] + 3), np.int64)
    chosen.fill(-1)
    chosen[:, : choice.shape[1]] = choice
    width = choice.shape[1] * outputs
    out = aligned((tokens + 1, row_stride(width)), 7.0)
    size = experts.experts_scratch_bytes(target, stored, depth) // 4

    def work(tid: int) -> None:
        scratch = aligned((size + 16,))
        _experts_kernel(target, form)(
            lines,
            lines.shape[1],
            0 if rows == 1 else depth,
            chosen,
            chosen.shape[1],
            out,
            out.shape[1],
            memory,
            padded_bias,
            memory.shape[1],
            tokens,
            choice.shape[1],
            len(weight),
            depth,
            outputs,
            tid,
            team,
            scratch,
        )
        assert np.isnan(scratch[size:]).all(), "wrote behind its scratch"

    in_team(team, work)
    assert (out[:, width:] == 7.0).all(), "wrote behind a row"
    assert (out[tokens:] == 7.0).all(), "wrote behind the last row"
    return out[:tokens, :width].reshape(tokens, -1, outputs)


@functools.cache
def _experts_kernel(target: Target, form: str) -> Callable[..., None]:
    kinds = tuple(kind for _, kind in experts.SIGNATURE)
    stored = FORMATS[form]
    text, name = experts.emit_experts(target, stored), experts.experts_name(stored)
    multiply = (linear.emit_linear(target, stored), linear.linear_name(stored))
    return load(text, name, target, kinds, (multiply,))


def run_top_k(target: Target, x: np.ndarray, count: int, team: int = 1) -> np.ndarray:
    """The places of the greatest of x [tokens, rows, elements], int64 [tokens, rows, count]."""
    tokens, rows, width = x.shape
    lines = rows_of(x.reshape(tokens, -1))
    out = np.full((tokens + 1, rows * count + 3), -1, np.int64)
    kinds = tuple(kind for _, kind in top_k.SIGNATURE)
    kernel = load(top_k.emit_top_k(), top_k.TOP_K, target, kinds)
    arguments = [lines, lines.shape[1], rows, width, out, out.shape[1], count, tokens]
    in_team(team, lambda tid: kernel(*arguments, tid, team))
    assert (out[:, rows * count :] == -1).all() and (out[tokens:] == -1).all()
    return out[:tokens, : rows * count].reshape(tokens, rows, count)


class Attending:
    """An attention kernel with a KV cache of two layers, of which it is the second."""

    def __init__(
        self,
        target: Target,
        shape: AttentionShape,
        kv_heads: int = 1,
        slots: int = 1,
        context: int = 128,
        scale: float = 0.25,
        window: int = 0,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
        slopes: np.ndarray | None = None,
    ) -> None:
        self.sinks, self.slopes = sinks, slopes
        self.shape, self.kv_heads = shape, kv_heads
        self.scale, self.window, self.softcap = scale, window, softcap
        kinds = tuple(kind for _, kind in attention.SIGNATURE)
        self._kernel = load(_attention_text(target, shape), shape.name, target, kinds)
        self._scratch_bytes = attention.attention_scratch_bytes(target, shape)
        self._partial_bytes = partial_bytes(target, shape)
        layer = KvLayer(kv_heads, shape.key, shape.value, shape.cache)
        self.cache = KvCache([KvLayer(1, 3, 5, shape.cache), layer], slots, context)
        self.capacity = -(-context // KV_BLOCK) * KV_BLOCK
        self.cache.apply([(slot, self.capacity, slot, 0) for slot in range(slots)])
        self.memory = [m.view(_CACHED[shape.cache]) for m in self.cache._memory]
        for memory in self.memory:
            memory.fill({4: np.nan, 2: 0x7FFF, 1: 0xFF}[memory.itemsize])

    def step(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        positions: Sequence[int] | np.ndarray,
        slots: Sequence[int] | np.ndarray | None = None,
        team: int = 1,
    ) -> np.ndarray:
        """One step: q [tokens, heads, key], k and v [tokens, kv heads, …] to [tokens, heads,
        value]; the cache keeps k and v."""
        tokens = len(q)
        place = np.array(positions, np.int64)
        slot = np.zeros(tokens, np.int64) if slots is None else np.array(slots, np.int64)
        rows = [rows_of(part.reshape(tokens, -1)) for part in (q, k, v)]
        width = self.shape.group * self.kv_heads * self.shape.value
        out = aligned((tokens + 1, row_stride(width)), 7.0)
        stride = self._scratch_bytes + 64
        scratch = aligned((team * stride // 4,))
        spans = -(-self.capacity // KV_SPAN)
        partials = aligned((SPLIT_UNITS * team * spans * self._partial_bytes // 4 + 16,))
        barrier = aligned_zeros((16,), np.int64)
        record = np.zeros(len(StepWord), np.int64)
        for word, value in {
            StepWord.TOKENS: tokens,
            StepWord.POSITIONS: place.ctypes.data,
            StepWord.SLOTS: slot.ctypes.data,
            StepWord.TEAM: team,
            StepWord.BARRIER: barrier.ctypes.data,
            StepWord.SLOT_BASE: self.cache.bases.ctypes.data,
            StepWord.SLOT_CAPACITY: self.cache.capacities.ctypes.data,
            StepWord.SCRATCH: scratch.ctypes.data,
            StepWord.SCRATCH_STRIDE: stride,
            StepWord.PARTIALS: partials.ctypes.data,
        }.items():
            record[word.value] = value
        arguments: list[Any] = []
        for row in (*rows, out):
            arguments += [row, row.shape[1]]
        arguments += [self.kv_heads, self.cache.offsets[1], self.scale, self.window, self.softcap]
        arguments += [self.sinks, self.slopes]
        in_team(team, lambda tid: self._kernel(*arguments, record, tid))
        gaps = scratch.reshape(team, -1)[:, -16:]
        assert np.isnan(gaps).all(), "wrote behind its scratch"
        assert np.isnan(partials[-16:]).all(), "wrote behind the partial results"
        assert (out[:, width:] == 7.0).all() and (out[tokens:] == 7.0).all()
        return out[:tokens, :width].reshape(tokens, -1, self.shape.value)


@functools.cache
def _attention_text(target: Target, shape: AttentionShape) -> str:
    return attention.emit_attention(target, shape)


@functools.cache
def host() -> Target:
    """The CPU that the tests run on."""
    return host_target()


def assert_same_bits(left: np.ndarray, right: np.ndarray) -> None:
    """Equal in every bit, NaN included."""
    assert left.dtype == right.dtype == np.float32 and left.shape == right.shape
    unequal = np.flatnonzero(
        np.ascontiguousarray(left).view(np.uint32) != np.ascontiguousarray(right).view(np.uint32)
    )
    assert len(unequal) == 0, f"{len(unequal)} of {left.size} differ, first at {unequal[0]}"
