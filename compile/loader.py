"""Loading objects into this process with LLVM's ORC JIT: no linker needed."""

import ctypes
import ctypes.util
import importlib.metadata
from collections.abc import Iterable

import llvmlite.binding as llvm

from buddy_pipeline.partition.errors import UserError

_OPENMP_LIBRARIES = ("libiomp5.so", "libomp.so", "libomp.so.5", "libomp.dylib")


class Library:
    """Compiled code in this process; addresses stay valid while the object lives."""

    def __init__(self, objects: Iterable[bytes], symbols: Iterable[str]) -> None:
        """Links `objects` with each other and this process; `symbols` are what will be called.

        Raises UserError when no OpenMP runtime is found, RuntimeError when linking fails.
        """
        load_openmp()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._jit = llvm.create_lljit_compiler()
        builder = llvm.JITLibraryBuilder()
        for data in objects:
            builder.add_object_img(data)
        for symbol in symbols:
            builder.export_symbol(symbol)
        self._tracker = builder.add_current_process().link(self._jit, "stage")

    def address(self, symbol: str) -> int:
        """The address of an exported symbol."""
        return int(self._tracker[symbol])


def load_openmp() -> None:
    """Loads LLVM's OpenMP runtime, which compiled code calls for its team of threads."""
    for candidate in _openmp_candidates():
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return
    raise UserError(
        "no OpenMP runtime was found (libiomp5 or libomp); install the package intel-openmp, "
        "or the system's libomp"
    )


def _openmp_candidates() -> Iterable[str]:
    try:
        files = importlib.metadata.files("intel-openmp") or []
        yield from (str(f.locate()) for f in files if f.name in _OPENMP_LIBRARIES)
    except importlib.metadata.PackageNotFoundError:
        pass
    yield from _OPENMP_LIBRARIES
    for name in ("omp", "iomp5"):
        found = ctypes.util.find_library(name)
        if found:
            yield found
