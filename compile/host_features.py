"""What this machine's CPU has, by LLVM's names of features.

LLVM's own table is complete on x86-64. On AArch64 it leaves out most of what Linux reports, the dot
product of 8-bit integers among it (LLVM 22), so the kernel's word is added.
"""

import ctypes
import platform

#: Bits of AT_HWCAP on AArch64 (Linux, arch/arm64/include/uapi/asm/hwcap.h).
_AARCH64_CAPABILITIES = {
    "fp-armv8": 0,
    "neon": 1,
    "aes": 3,
    "sha2": 6,
    "crc": 7,
    "lse": 8,
    "fullfp16": 10,
    "rdm": 12,
    "rcpc": 15,
    "dotprod": 20,
}
_AT_HWCAP = 16


def host_features() -> dict[str, bool]:
    """Whether the CPU has a feature, for each that LLVM or the kernel knows of."""
    import llvmlite.binding as llvm

    features = dict(llvm.get_host_cpu_features())
    if platform.machine() == "aarch64":  # its name on Linux
        capabilities = _capabilities()
        features |= {name: bool(capabilities >> b & 1) for name, b in _AARCH64_CAPABILITIES.items()}
    return features


def flattened(features: dict[str, bool]) -> str:
    """The features as LLVM's code generator takes them: +neon,-sve,…"""
    return ",".join(f"{'+' if there else '-'}{name}" for name, there in sorted(features.items()))


def _capabilities() -> int:
    """The auxiliary vector's word on the CPU."""
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return int(getauxval(_AT_HWCAP))
