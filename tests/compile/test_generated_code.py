"""What the compilers make of our kernels: vectors in the hot loops, nothing of libm, and objects
that link, for every target, also those that cannot run here."""

import functools
import itertools
import re
from dataclasses import dataclass, replace

import pytest

from buddy_pipeline.compile.codegen import compile_object, optimise, target_machine
from buddy_pipeline.compile.formats import FORMATS
from buddy_pipeline.compile.formats.base import places
from buddy_pipeline.compile.formats.blocks import BlockFormat
from buddy_pipeline.compile.formats.integer_activation import IntegerBlocks
from buddy_pipeline.compile.kernels import attention, driver, embedding, linear
from buddy_pipeline.compile.kernels.attention_shape import AttentionShape
from buddy_pipeline.compile.kernels.step import BARRIER, END_REGION
from buddy_pipeline.compile.lowering import lower_island, lower_kernel
from buddy_pipeline.compile.target import Target, named_target
from buddy_pipeline.compile.template_kernels import draft_libraries
from buddy_pipeline.compile.template_symbols import island_symbol
from buddy_pipeline.compile.templates import emit_template
from tests.compile.assembly import Code, functions
from tests.compile.elf import MACHINES, read_elf
from tests.compile.models import large_llama

TARGETS = [named_target(n) for n in ("x86-64-v4", "x86-64-v3", "aarch64", "riscv64")]
WITH_BF16 = replace(named_target("x86-64-v4"), features="+avx512bf16", bf16_dot=True)
on_each_target = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.triple[:7] + t.cpu[-3:])
#: Formats of plain numbers, and of blocks of small ones.
PLAIN = ["f32", "bf16", "f16"]
BLOCKS = [name for name, form in FORMATS.items() if isinstance(form, BlockFormat)]
#: Dot products of bytes as each target multiplies and adds them.
BYTE_TARGETS = {
    "x86-64-v4": (named_target("x86-64-v4"), "^vpmaddubsw .*%zmm"),
    "x86-64-v3": (named_target("x86-64-v3"), "^vpmaddubsw .*%ymm"),
    "vnni": (
        replace(named_target("x86-64-v4"), features="+avx512vnni", int8_dot="vpdpbusd"),
        "^vpdpbusd .*%zmm",
    ),
    "avxvnni": (
        replace(named_target("x86-64-v3"), features="+avxvnni", int8_dot="vpdpbusd"),
        "^(\\{vex\\} )?vpdpbusd .*%ymm",
    ),
    "neoverse-n1": (named_target("neoverse-n1"), r"^sdot v\d+\.4s"),
}


def form_id(value: object) -> str:
    """A short name for a parameter."""
    if isinstance(value, Target):
        return f"{value.triple[:7]}{value.cpu[-3:]}{value.features[:12]}"
    return str(value)


on_each_target_and_form = pytest.mark.parametrize(
    ("target", "form"),
    [*itertools.product(TARGETS, PLAIN), (WITH_BF16, "bf16")],
    ids=form_id,
)

SHAPES = [AttentionShape(64, 64, 3, False, "f32"), AttentionShape(45, 45, 7, True, "bf16")]

#: What LLVM makes of loops that copy or clear; every process has it.
C_LIBRARY = {"memcpy", "memset"}
#: Fused multiply-adds of vectors.
FUSED = r"^(vfn?madd|fmla|vfmacc|vfmadd)"
#: What puts a vector into memory.
VECTOR_STORE = r"^vmov\w+ %[xyz]mm\d+, .*\(|^st[rp] |^vs\w*\d*\.v |^vse\d|^vs\dr"
#: What a target's whole vectors look like in assembly.
WHOLE_VECTOR = {"x86-64-v4": "%zmm", "x86-64-v3": "%ymm", "generic": r"v\d+\.4s"}


@dataclass(frozen=True)
class Built:
    """A kernel at each step of compilation."""

    ir: str
    code: dict[str, Code]
    object: bytes

    def parts(self, prefix: str) -> dict[str, Code]:
        """The functions whose names start so."""
        found = {name: body for name, body in self.code.items() if name.startswith(prefix)}
        assert found
        return found

    def ir_parts(self, prefix: str) -> dict[str, str]:
        """The functions of the LLVM IR, before any optimisation, whose names start so."""
        bodies = dict(re.findall(r"^define [^@\n]*@(\w+)\((.*?)^}", self.ir, re.M | re.S))
        found = {name: body for name, body in bodies.items() if name.startswith(prefix)}
        assert found
        return found


@functools.cache
def built(text: str, symbol: str, target: Target) -> Built:
    ir = lower_kernel(text)
    module = optimise([ir], [symbol], target)
    # The object first: code generation changes the module.
    data = target_machine(target).emit_object(module)
    return Built(ir, functions(module, target), data)


def built_linear(target: Target, form: str) -> Built:
    name = linear.linear_name(FORMATS[form])
    return built(linear.emit_linear(target, FORMATS[form]), name, target)


def built_attention(target: Target, shape: AttentionShape) -> Built:
    return built(attention.emit_attention(target, shape), shape.name, target)


def chains_of(tile: str, target: Target) -> int:
    """Accumulators of a register tile, which is named after its tokens."""
    return len(places(target, int(tile.removeprefix("tile_"))))


def has_whole_vectors(code: Code, target: Target) -> bool:
    pattern = WHOLE_VECTOR.get(target.cpu)
    return pattern is None or bool(code.with_word(pattern))


@on_each_target_and_form
def test_linear_tiles_multiply_and_add_whole_vectors_only(target: Target, form: str) -> None:
    wanted = r"^vdpbf16ps" if target.bf16_dot else r"^(vfn?madd|fmla|vfmacc|vfmadd)"
    for name, tile in built_linear(target, form).parts("tile_").items():
        chains = chains_of(name, target)
        loops = [loop for loop in tile.innermost_loops() if loop.packed()]
        assert loops, name
        assert tile.scalar() == [], name
        for loop in loops:
            fused = loop.with_word(wanted)
            assert fused == loop.packed(), name
            assert len(fused) % chains == 0, name
            assert has_whole_vectors(loop, target), name


@on_each_target_and_form
def test_accumulators_of_linear_tiles_stay_in_registers(target: Target, form: str) -> None:
    """A tile that is too large for the registers would store with every step. (LLVM's scheduler
    moves one vector of weights through memory in AVX-512's largest tile, once in 48, and more of
    them where pairs of bf16 are widened.)"""
    multiplies_a_store = 8 if form == "bf16" and not target.bf16_dot else 24
    for name, tile in built_linear(target, form).parts("tile_").items():
        for loop in tile.innermost_loops():
            stored = loop.with_word(VECTOR_STORE)
            assert multiplies_a_store * len(stored) <= len(loop.packed()), name


def test_matrix_tiles_do_nothing_but_load_and_multiply_tiles() -> None:
    features = "+avx512bf16,+amx-tile,+amx-bf16"
    target = replace(WITH_BF16, features=features, bf16_tiles=True)
    kernel = built_linear(target, "bf16")
    parts = kernel.parts("product_")
    shares = [4, 8, 16, 32]
    several = {f"product_{rows}_1_{lines}" for rows in (1, 2) for lines in shares}
    alone = {"product_1_1_stream", "product_1_2_stream"}
    assert set(parts) == alone | several - {"product_1_1_32"}
    for name, tile in parts.items():
        rows, panels = map(int, re.findall(r"\d+", name)[:2])
        (loop,) = tile.innermost_loops()
        assert len(loop.with_word("^tdpbf16ps")) == 2 * rows * panels, name
        assert len(loop.with_word("^tileloadd")) == rows + 2 * panels, name
        assert loop.with_word("^tilestored|^v|%[xyz]mm") == [], name
    check_object(kernel, linear.linear_name(FORMATS["bf16"]), target)


def test_few_tokens_beside_the_matrix_unit_multiply_whole_vectors_in_registers() -> None:
    """Per pair of k and vector of outputs an even and an odd product for each token."""
    features = "+avx512bf16,+amx-tile,+amx-bf16"
    target = replace(WITH_BF16, features=features, bf16_tiles=True)
    parts = built_linear(target, "bf16").parts("few_tokens_")
    assert sorted(parts) == ["few_tokens_1", "few_tokens_2", "few_tokens_3"]
    for name, part in parts.items():
        rows, vectors = int(name[-1]), target.panel_vectors
        loops = [loop for loop in part.innermost_loops() if loop.with_word("^vfn?madd")]
        products = {len(loop.with_word("^vfn?madd.*ps")) for loop in loops}
        pair = 2 * rows * vectors
        side_by_side = (1, 3) if rows == 1 else (1,)
        # The last pairs of K, and whole tiles.
        assert products == {n * pair * count for n in side_by_side for count in (1, 16)}, name
        assert part.scalar() == [], name
        for loop in loops:
            assert loop.with_word(VECTOR_STORE) == [], name


@pytest.mark.parametrize("form", ["f32", "bf16", "f16", "q4_1", "w8a8"])
def test_few_tokens_ask_for_weights_ahead_unless_the_cpu_does(form: str) -> None:
    """A Zen 4 is slower with it."""
    for cpu, asks in (("x86-64-v4", True), ("znver4", False)):
        text = linear.emit_linear(replace(named_target("x86-64-v4"), cpu=cpu), FORMATS[form])
        tile = text.split("func.func private @tile_1(")[1].split("func.func")[0]
        assert ("llvm.intr.prefetch" in tile) == asks, cpu


@pytest.mark.parametrize(
    ("target", "form"),
    [
        *itertools.product(["x86-64-v3", "neoverse-n1"], [f for f in BLOCKS if "exact" not in f]),
        *itertools.product(["x86-64-v4", "vnni", "avxvnni"], ["q4_0", "q8_0", "q8_0_a16"]),
    ],
)
def test_block_tiles_multiply_bytes(target: str, form: str) -> None:
    """Eight dot products of four bytes for a vector of outputs, a token and 32 elements, twice as
    many for activations in two parts."""
    described, dot = BYTE_TARGETS[target]
    activation = FORMATS[form].activation(described)
    assert isinstance(activation, IntegerBlocks)
    dots = 8 * activation.parts
    kernel = built_linear(described, form)
    for name, tile in kernel.parts("tile_").items():
        chains = chains_of(name, described)
        assert tile.scalar() == [], name
        loops = [loop for loop in tile.innermost_loops() if loop.with_word(dot)]
        assert loops, name
        assert all(len(loop.with_word(dot)) == dots * chains for loop in loops), name
    check_object(kernel, linear.linear_name(FORMATS[form]), described)


@pytest.mark.parametrize("target", ["x86-64-v3", "aarch64", "riscv64"])
@pytest.mark.parametrize("form", ["q4_1_exact", "q8_0_exact"])
def test_exact_block_tiles_compute_in_vectors_only(target: str, form: str) -> None:
    described = named_target(target)
    kernel = built_linear(described, form)
    for name, tile in kernel.parts("tile_").items():
        chains = chains_of(name, described)
        assert tile.scalar() == [], name
        loops = [loop for loop in tile.innermost_loops() if loop.packed()]
        assert loops, name
        for loop in loops:
            assert len(loop.with_word(r"^(vfmadd|fmla|vfmacc|vfmadd)")) >= 4 * chains, name
            assert has_whole_vectors(loop, described), name
    check_object(kernel, linear.linear_name(FORMATS[form]), described)


@on_each_target
def test_linear_tiles_before_optimisation(target: Target) -> None:
    """One aligned load for each vector of weights, fused multiply-adds, no other arithmetic."""
    lanes = target.lanes
    for name, body in built_linear(target, "f32").ir_parts("tile_").items():
        chains, columns = chains_of(name, target), target.panel_vectors
        fused = re.findall(rf"call <{lanes} x float> @llvm\.fma\.v{lanes}f32", body)
        assert fused and len(fused) % chains == 0, name
        assert not re.search(r"\b(fmul|fadd|fsub|fdiv|fmuladd)\b", body), name
        # A vector of weights serves all rows; besides there are the bias and the sums so far.
        loads = re.findall(rf"load <{lanes} x float>, ptr %\w+, align (\d+)", body)
        assert len(loads) == len(fused) * columns // chains + columns + chains, name
        assert set(loads) == {str(4 * lanes)}, name
        assert len(re.findall("load float,", body)) == len(fused) // columns, name


@on_each_target
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_attention_computes_in_vectors_only(target: Target, shape: AttentionShape) -> None:
    kernel = built_attention(target, shape)
    for name, part in {**kernel.parts("scores_"), **kernel.parts("values_")}.items():
        loops = [loop for loop in part.innermost_loops() if loop.packed()]
        assert loops, name
        for loop in loops:
            assert loop.scalar() == [], name
            assert loop.with_word(FUSED) == loop.packed(), name
            assert has_whole_vectors(loop, target), name
    for name, softmax in kernel.parts("softmax_").items():
        tokens, heads = map(int, re.findall(r"\d+", name))
        assert softmax.scalar() == [], name
        (loop,) = [loop for loop in softmax.innermost_loops() if loop.with_word(FUSED)]
        assert len(loop.with_word(FUSED)) == 5 * tokens * heads, name
    for name, merge in kernel.parts("merge_").items():
        assert merge.packed() and merge.scalar() == [], name


@on_each_target
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_scores_and_sums_of_values_stay_in_registers(target: Target, shape: AttentionShape) -> None:
    """LLVM also makes loops over what a tile does without any position; they multiply less. (As in
    linear tiles, a vector or two may pass through memory where 16 bits are widened.)"""
    multiplies_a_store = 8 if shape.cache == "bf16" else 24
    kernel = built_attention(target, shape)
    for name, part in {**kernel.parts("scores_"), **kernel.parts("values_")}.items():
        hot = max(part.innermost_loops(), key=lambda loop: len(loop.packed()))
        tokens, heads = map(int, re.findall(r"\d+", name)[:2])
        assert len(hot.packed()) % (tokens * heads) == 0, name
        assert multiplies_a_store * len(hot.with_word(VECTOR_STORE)) <= len(hot.packed()), name


@on_each_target
def test_epilogues_compute_in_whole_vectors_and_call_nothing(target: Target) -> None:
    """The product of gate and up, and the last residual, of each panel that is finished."""
    llama = large_llama()
    drafted = llama.drafts(target)["layer0"]
    draft = drafted.draft
    modules = [lower_kernel(emit_template(draft, draft.name(), target))]
    for number, island in enumerate(drafted.bound.islands):
        modules.append(lower_island(llama.text(island), island_symbol(draft.name(), number)))
    code = functions(optimise(modules, [draft.name()], target), target)
    epilogues = {name: body for name, body in code.items() if "_epilogue" in name}
    assert len(epilogues) == 2
    for name, body in epilogues.items():
        assert body.with_word(r"^(call|bl |blr|jalr|tail )") == [], name
        assert has_whole_vectors(body, target), name
        assert [line for loop in body.innermost_loops() for line in loop.scalar()] == [], name


@functools.cache
def island_code(target: Target) -> dict[str, Code]:
    """The islands of a llama of real size that are no epilogues, by place."""
    llama = large_llama()
    code = {}
    islands = llama.islands(target).items()
    for place, island in ((place, island) for place, island in islands if not island.columns):
        ir = lower_island(llama.text(island), "island")
        code[place] = functions(optimise([ir], ["island"], target), target)["island"]
    return code


@on_each_target
def test_loops_of_llama_islands_compute_in_vectors_only(target: Target) -> None:
    """Rotary tables, both norms with their residuals, rotation."""
    islands = island_code(target)
    assert len(islands) == 4
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


def check_object(kernel: Built, symbol: str, target: Target) -> None:
    file = read_elf(kernel.object)
    assert file.machine == MACHINES[target.triple.split("-")[0]]
    assert file.visible == {symbol}
    assert file.undefined <= {BARRIER, *C_LIBRARY}


@on_each_target_and_form
def test_objects_of_linear_and_embedding_need_nothing(target: Target, form: str) -> None:
    check_object(built_linear(target, form), linear.linear_name(FORMATS[form]), target)
    name = embedding.embedding_name(FORMATS[form])
    kernel = built(embedding.emit_embedding(target, FORMATS[form]), name, target)
    check_object(kernel, name, target)


@on_each_target
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_objects_of_attention_need_the_barrier_only(target: Target, shape: AttentionShape) -> None:
    check_object(built_attention(target, shape), shape.name, target)


@on_each_target
def test_the_driver_needs_openmp_and_defines_the_barrier(target: Target) -> None:
    kernel = built(driver.emit_driver(target), driver.DRIVER, target)
    file = read_elf(kernel.object)
    assert file.machine == MACHINES[target.triple.split("-")[0]]
    assert file.visible == {driver.DRIVER, driver.TICKS, BARRIER, END_REGION}
    assert file.undefined - C_LIBRARY == {
        "sched_yield",
        "omp_get_thread_num",
        "__kmpc_fork_call",
        "__kmpc_global_thread_num",
        "__kmpc_push_num_threads",
    }


@on_each_target
def test_template_objects_need_their_kernels_only(target: Target) -> None:
    llama = large_llama()
    for place, drafted in llama.drafts(target).items():
        if place in ("layer1", "layer2"):
            continue  # the same template as layer0
        draft = drafted.draft
        modules = [lower_kernel(emit_template(draft, draft.name(), target))]
        for number, island in enumerate(drafted.bound.islands):
            symbol = island_symbol(draft.name(), number)
            modules.append(lower_island(llama.text(island), symbol))
        file = read_elf(compile_object(modules, [draft.name()], target))
        assert file.machine == MACHINES[target.triple.split("-")[0]]
        assert draft.name() in file.visible, place
        assert file.undefined - C_LIBRARY == {END_REGION, *draft_libraries(draft, target)}, place


@on_each_target
def test_the_same_source_gives_the_same_bytes(target: Target) -> None:
    """Ranks with the same CPU may share objects, and a cache key stands for one object."""
    shape = SHAPES[0]
    text = attention.emit_attention(target, shape)
    assert text == attention.emit_attention(target, shape)
    first, again = (compile_object([lower_kernel(text)], [shape.name], target) for _ in range(2))
    assert first == again
