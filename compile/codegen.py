"""From LLVM IR to an object file for one CPU, through LLVM's optimiser."""

import functools
from collections.abc import Sequence

import llvmlite.binding as llvm

from buddy_pipeline.compile.object_file import note
from buddy_pipeline.compile.target import Target


@functools.cache
def initialise() -> None:
    """Makes every target known to LLVM."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def target_machine(target: Target) -> llvm.TargetMachine:
    """LLVM's code generator for `target`, position independent so that it loads anywhere."""
    initialise()
    features = target.features
    if target.vector_bits == 512:
        # LLVM takes half of AVX-512's width for some Intel CPUs, which islands are slower with.
        features += ",-prefer-256-bit"
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=features.lstrip(","), opt=3, reloc="pic", codemodel="default"
    )


def compile_object(ir_texts: list[str], symbols: Sequence[str], target: Target) -> bytes:
    """An object file of LLVM IR modules, with a note on what it is; see `optimise`."""
    texts = [*ir_texts, _identification(symbols, target)]
    return target_machine(target).emit_object(optimise(texts, symbols, target))


def optimise(ir_texts: list[str], symbols: Sequence[str], target: Target) -> llvm.ModuleRef:
    """Links LLVM IR modules into one and optimises it for `target`.

    Only `symbols` and names that start with "bp_" stay visible outside the module.
    """
    machine = target_machine(target)
    module = llvm.parse_assembly(ir_texts[0])
    for text in ir_texts[1:]:
        module.link_in(llvm.parse_assembly(text))
    module.triple = target.triple
    module.data_layout = str(machine.target_data)
    for function in module.functions:
        if function.is_declaration:
            continue
        if function.name not in symbols and not function.name.startswith("bp_"):
            function.linkage = "internal"
        # Every function is a loop nest of its own: inlining would only multiply code and time. But
        # an epilogue's island has a few columns.
        if b"alwaysinline" not in function.attributes:
            function.add_function_attribute("noinline")
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    options.slp_vectorization = True
    # Kernels are unrolled by their emitters; of an island's nest, LLVM would unroll the inner loop
    # (32 pairs of a rotary head) and vectorise the outer one, with gathers: 2.3 times as slow.
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    module.verify()
    return module


def _identification(symbols: Sequence[str], target: Target) -> str:
    """LLVM IR that puts a note on what this is into the object's `.comment` section."""
    return f'!llvm.ident = !{{!0}}\n!0 = !{{!"{note(tuple(symbols), target.cpu, target.triple)}"}}'
