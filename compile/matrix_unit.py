"""Leave to use the CPU's matrix unit (AMX), which Linux gives to processes that ask for it."""

import ctypes
import functools
import platform
import sys

# https://docs.kernel.org/arch/x86/xstate.html
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@functools.cache
def request_matrix_unit() -> bool:
    """Asks for this process and its threads, once; whether tiles may be used from now on."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    answer: int = libc.syscall(
        ctypes.c_long(_SYS_ARCH_PRCTL),
        ctypes.c_long(_ARCH_REQ_XCOMP_PERM),
        ctypes.c_long(_XFEATURE_XTILEDATA),
    )
    return answer == 0
