"""Loading objects into this process with LLVM's ORC JIT: no linker needed."""

import ctypes
import ctypes.util
import importlib.metadata
from collections.abc import Iterable

import llvmlite.binding as llvm

from buddy_pipeline.compile.matrix_unit import request_matrix_unit
from buddy_pipeline.partition.errors import UserError

#: What the driver's team calls. Bound to LLVM's runtime one by one: a process that has imported
#: torch also holds GNU's, in which `omp_get_thread_num` would say 0 to every thread of our team.
_OPENMP_SYMBOLS = (
    "__kmpc_fork_call",
    "__kmpc_global_thread_num",
    "__kmpc_push_num_threads",
    "omp_get_thread_num",
)
_OPENMP_LIBRARIES = ("libiomp5.so", "libomp.so", "libomp.so.5", "libomp.dylib")


class Library:
    """Compiled code in this process; addresses stay valid while the object lives."""

    def __init__(self, objects: Iterable[bytes], symbols: Iterable[str]) -> None:
        """Links `objects` with each other and this process; `symbols` are what will be called.

        Raises UserError when no OpenMP runtime is found, RuntimeError when linking fails.
        """
        openmp = load_openmp()
        request_matrix_unit()  # for code that uses it; where there is none it is refused
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        # Without JITLink LLVM's older linker is used, which on AArch64 ends the process where an
        # object's constants lie too far from its code, and which does not know RISC-V.
        self._jit = llvm.create_lljit_compiler(use_jit_link=True)
        builder = llvm.JITLibraryBuilder()
        for data in objects:
            builder.add_object_img(data)
        for symbol in _OPENMP_SYMBOLS:
            builder.import_symbol(symbol, _address(openmp, symbol))
        for symbol in symbols:
            builder.export_symbol(symbol)
        self._tracker = builder.add_current_process().link(self._jit, "stage")

    def address(self, symbol: str) -> int:
        """The address of an exported symbol."""
        return int(self._tracker[symbol])


def load_openmp() -> ctypes.CDLL:
    """Loads LLVM's OpenMP runtime, which compiled code calls for its team of threads.

    Raises UserError if there is none.
    """
    for candidate in _openmp_candidates():
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise UserError(
        "no OpenMP runtime was found (libiomp5 or libomp); install the package intel-openmp, "
        "or the system's libomp"
    )


def _address(library: ctypes.CDLL, symbol: str) -> int:
    address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
    assert address is not None
    return address


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
