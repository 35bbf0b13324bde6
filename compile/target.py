"""The CPU that code is generated for: its name, its vectors, and the tile shapes that follow."""

import functools
import hashlib
from dataclasses import asdict, dataclass

from buddy_pipeline.partition.errors import UserError


@dataclass(frozen=True)
class Target:
    """One kind of CPU.

    `vector_bits` is the width of the vectors that kernels are written in and `registers` how many
    of them the CPU has. `bf16_dot` says that it multiplies bf16 pairs into f32 in one instruction,
    `int8_dot` how it multiplies 8-bit integers: "vpdpbusd", "pmaddubsw", "sdot" (see
    `formats.integer_dot`), or "" for not at all.
    """

    triple: str
    cpu: str
    features: str
    vector_bits: int
    registers: int
    bf16_dot: bool
    int8_dot: str

    @property
    def lanes(self) -> int:
        """f32 elements in one vector."""
        return self.vector_bits // 32

    @property
    def panel_vectors(self) -> int:
        """Vectors side by side in one weight panel: two for wide vectors, four for 128-bit ones."""
        return 2 if self.lanes >= 8 else 4

    @property
    def panel(self) -> int:
        """Outputs of one packed weight panel (the `nr` of a GEMM tile)."""
        return self.lanes * self.panel_vectors

    def digest(self) -> str:
        """A short hash over everything that changes generated code."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]


@functools.cache
def host_target() -> Target:
    """The CPU this process runs on."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return _describe(
        llvm.get_process_triple(), llvm.get_host_cpu_name(), features.flatten(), features
    )


def named_target(cpu: str) -> Target:
    """The target a user names: `host`, an x86-64 level or CPU, or an AArch64 or RISC-V triple.

    Raises UserError for a name that LLVM does not know.
    """
    if cpu in ("", "host", "native"):
        return host_target()
    if cpu in _NAMED:
        return _NAMED[cpu]
    known = ", ".join(["host", *_NAMED])
    raise UserError(f"target CPU '{cpu}' is not known; use one of {known}")


def _describe(triple: str, cpu: str, features: str, present: "dict[str, bool]") -> Target:
    """Reads the vector width and register count off a feature table."""
    architecture = triple.split("-")[0]
    if architecture == "x86_64":
        if present.get("avx512f") and present.get("avx512vl") and present.get("avx512bw"):
            int8 = "vpdpbusd" if present.get("avx512vnni") else "pmaddubsw"
            return Target(triple, cpu, features, 512, 32, bool(present.get("avx512bf16")), int8)
        if present.get("avx2") and present.get("fma"):
            int8 = "vpdpbusd" if present.get("avxvnni") else "pmaddubsw"
            return Target(triple, cpu, features, 256, 16, False, int8)
        raise UserError(f"CPU '{cpu}' has neither AVX-512 nor AVX2 with FMA; no kernels for it")
    if architecture in ("aarch64", "arm64"):
        int8 = "sdot" if present.get("dotprod") else ""
        return Target(triple, cpu, features, 128, 32, False, int8)
    raise UserError(f"architecture '{architecture}' has no kernels; use x86_64 or aarch64")


_LINUX_X86 = "x86_64-unknown-linux-gnu"
_NAMED = {
    "x86-64-v4": Target(_LINUX_X86, "x86-64-v4", "", 512, 32, False, "pmaddubsw"),
    "x86-64-v3": Target(_LINUX_X86, "x86-64-v3", "", 256, 16, False, "pmaddubsw"),
    "aarch64": Target("aarch64-unknown-linux-gnu", "generic", "+neon", 128, 32, False, ""),
    # Server CPUs since 2019: dot products of 8-bit integers.
    "neoverse-n1": Target("aarch64-unknown-linux-gnu", "neoverse-n1", "", 128, 32, False, "sdot"),
    # What the RVA23 profile asks for.
    "riscv64": Target(
        "riscv64-unknown-linux-gnu",
        "generic-rv64",
        "+m,+a,+f,+d,+v,+zfhmin,+zvfhmin",
        128,
        32,
        False,
        "",
    ),
}
