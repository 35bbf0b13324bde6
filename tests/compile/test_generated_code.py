"""What the compilers make of our kernels: vectors in the hot loops, nothing of libm, and objects
that link, for every target, also those that cannot run here."""

import functools
import re

import pytest

from buddy_pipeline.compile.codegen import compile_object
from buddy_pipeline.compile.kernels import attention, driver, embedding, linear
from buddy_pipeline.compile.kernels.attention import AttentionShape
from buddy_pipeline.compile.kernels.step import BARRIER
from buddy_pipeline.compile.lowering import lower_island, lower_kernel
from buddy_pipeline.compile.target import Target, named_target
from buddy_pipeline.compile.templates import emit_template, island_symbol
from tests.compile.assembly import Code, functions
from tests.compile.elf import MACHINES, read_elf
from tests.compile.harness import kernel_object
from tests.compile.models import large_llama

TARGETS = [named_target(n) for n in ("x86-64-v4", "x86-64-v3", "aarch64", "riscv64")]
on_each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)

SHAPE = AttentionShape(64, 64, 4, False)
CAPPED = AttentionShape(45, 45, 3, True)

#: What LLVM makes of loops that copy or clear; every process has it.
C_LIBRARY = {"memcpy", "memset"}
#: What a target's whole vectors look like in assembly.
WHOLE_VECTOR = {"x86-64-v4": "%zmm", "x86-64-v3": "%ymm", "generic": r"v\d+\.4s"}


@functools.cache
def linear_ir(target: Target) -> str:
    return lower_kernel(linear.emit_linear(target))


@functools.cache
def linear_code(target: Target) -> dict[str, Code]:
    return functions(linear_ir(target), linear.linear_name(), target)


@functools.cache
def attention_code(target: Target) -> dict[str, Code]:
    return functions(lower_kernel(attention.emit_attention(target, SHAPE)), SHAPE.name, target)


def of_prefix(code: dict[str, Code], prefix: str) -> dict[str, Code]:
    found = {name: body for name, body in code.items() if name.startswith(prefix)}
    assert found
    return found


def has_whole_vectors(code: Code, target: Target) -> bool:
    pattern = WHOLE_VECTOR.get(target.cpu)
    return pattern is None or bool(code.with_word(pattern))


@on_each_target
def test_linear_tiles_multiply_and_add_whole_vectors_only(target: Target) -> None:
    for name, tile in of_prefix(linear_code(target), "tile_").items():
        rows, panels = map(int, re.findall(r"\d+", name))
        chains = rows * panels * target.panel_vectors
        loops = [loop for loop in tile.innermost_loops() if loop.packed()]
        assert loops, name
        assert tile.scalar() == [], name
        for loop in loops:
            fused = loop.with_word(r"^(vfn?madd|fmla|vfmacc|vfmadd)")
            assert fused == loop.packed(), name
            assert len(fused) % chains == 0, name
            assert has_whole_vectors(loop, target), name


@on_each_target
def test_accumulators_of_linear_tiles_stay_in_registers(target: Target) -> None:
    """A tile that is too large for the registers would store with every step. (LLVM's scheduler
    moves one vector of weights through memory in AVX-512's largest tile, once in 48.)"""
    stores = r"^vmov\w+ %[xyz]mm\d+, .*\(|^st[rp] |^vs\w*\d*\.v |^vse\d|^vs\dr"
    for name, tile in of_prefix(linear_code(target), "tile_").items():
        for loop in tile.innermost_loops():
            assert 24 * len(loop.with_word(stores)) <= len(loop.packed()), name


def ir_functions(text: str, prefix: str) -> dict[str, str]:
    """Bodies of the functions of an LLVM IR module whose names start so."""
    bodies = dict(re.findall(r"^define [^@\n]*@(\w+)\((.*?)^}", text, re.M | re.S))
    return {name: body for name, body in bodies.items() if name.startswith(prefix)}


@on_each_target
def test_linear_tiles_before_optimisation(target: Target) -> None:
    """One aligned load for each vector of weights, fused multiply-adds, no other arithmetic."""
    lanes = target.lanes
    tiles = ir_functions(linear_ir(target), "tile_")
    assert tiles
    for name, body in tiles.items():
        rows, panels = map(int, re.findall(r"\d+", name))
        columns = panels * target.panel_vectors
        fused = re.findall(rf"call <{lanes} x float> @llvm\.fma\.v{lanes}f32", body)
        assert fused and len(fused) % (rows * columns) == 0, name
        assert not re.search(r"\b(fmul|fadd|fsub|fdiv|fmuladd)\b", body), name
        # A vector of weights serves all rows; besides there are the bias and the sums so far.
        loads = re.findall(rf"load <{lanes} x float>, ptr %\w+, align (\d+)", body)
        assert len(loads) == len(fused) // rows + columns + rows * columns, name
        assert set(loads) == {str(4 * lanes)}, name
        assert len(re.findall("load float,", body)) == len(fused) // columns, name


@on_each_target
def test_attention_computes_in_vectors_only(target: Target) -> None:
    for name, rows in of_prefix(attention_code(target), "rows_").items():
        assert rows.scalar() == [], name
        loops = rows.innermost_loops()
        assert len(loops) >= 2 and all(loop.packed() for loop in loops), name
        assert all(has_whole_vectors(loop, target) for loop in loops), name


@functools.cache
def island_code(target: Target) -> dict[str, Code]:
    """The islands of a llama of real size, by place."""
    llama = large_llama()
    code = {}
    for place, island in llama.islands(target).items():
        ir = lower_island(llama.text(island), "island")
        code[place] = functions(ir, "island", target)["island"]
    return code


@on_each_target
def test_loops_of_llama_islands_compute_in_vectors_only(target: Target) -> None:
    """Rotary tables, both norms with their residuals, rotation, SwiGLU, the last residual."""
    islands = island_code(target)
    assert len(islands) == 6
    for place, code in islands.items():
        loops = [loop for loop in code.innermost_loops() if loop.packed()]
        assert loops, place
        assert [line for loop in loops for line in loop.scalar()] == [], place
        assert code.with_word(r"vp?gather|vp?scatter|vluxei|vloxei") == [], place


@on_each_target
def test_islands_of_llama_call_nothing_of_libm(target: Target) -> None:
    for place, code in island_code(target).items():
        for call in code.with_word(r"^(call|bl |blr|jalr|tail )"):
            assert re.search("memcpy|memset", call), f"{place}: {call}"


@on_each_target
@pytest.mark.parametrize("what", ["linear", "attention", "capped", "embedding", "driver"])
def test_kernel_objects_need_nothing_but_what_is_declared(target: Target, what: str) -> None:
    texts = {
        "linear": (linear.emit_linear(target), linear.linear_name()),
        "attention": (attention.emit_attention(target, SHAPE), SHAPE.name),
        "capped": (attention.emit_attention(target, CAPPED), CAPPED.name),
        "embedding": (embedding.emit_embedding(target), embedding.EMBEDDING),
        "driver": (driver.emit_driver(target), driver.DRIVER),
    }
    text, symbol = texts[what]
    file = read_elf(kernel_object(text, symbol, target))
    assert file.machine == MACHINES[target.triple.split("-")[0]]
    if what == "driver":
        assert file.visible == {symbol, BARRIER}
        # LLVM's OpenMP runtime and the C library, both in the process.
        assert file.undefined == {
            "sched_yield",
            "omp_get_thread_num",
            "__kmpc_fork_call",
            "__kmpc_global_thread_num",
            "__kmpc_push_num_threads",
        }
    else:
        assert file.visible == {symbol}
        assert file.undefined <= {BARRIER, *C_LIBRARY}


@on_each_target
def test_template_objects_need_their_kernels_only(target: Target) -> None:
    llama = large_llama()
    for place, drafted in llama.drafts(target).items():
        if place in ("layer1", "layer2"):
            continue  # the same template as layer0
        draft = drafted.draft
        modules = [lower_kernel(emit_template(draft, target))]
        for number, island in enumerate(drafted.islands):
            symbol = island_symbol(draft.name(), number)
            modules.append(lower_island(llama.text(island), symbol))
        file = read_elf(compile_object(modules, draft.name(), target))
        assert file.machine == MACHINES[target.triple.split("-")[0]]
        assert draft.name() in file.visible, place
        assert file.undefined - C_LIBRARY == {BARRIER, *draft.libraries(target)}, place


@on_each_target
def test_the_same_source_gives_the_same_bytes(target: Target) -> None:
    """Ranks with the same CPU may share objects, and a cache key stands for one object."""
    text = attention.emit_attention(target, SHAPE)
    assert text == attention.emit_attention(target, SHAPE)
    first, again = (compile_object([lower_kernel(text)], SHAPE.name, target) for _ in range(2))
    assert first == again
