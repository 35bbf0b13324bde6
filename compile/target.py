"""The CPU that code is generated for: its name, its vectors, and the tile shapes that follow."""

import functools
import hashlib
from dataclasses import asdict, dataclass

from buddy_pipeline.compile.host_features import flattened, host_features
from buddy_pipeline.compile.matrix_unit import request_matrix_unit
from buddy_pipeline.partition.errors import UserError


@dataclass(frozen=True)
class Target:
    """One kind of CPU.

    `vector_bits` is the width of the vectors that kernels are written in and `registers` how many
    of them the CPU has. `bf16_dot` says that it multiplies bf16 pairs into f32 in one instruction,
    `int8_dot` how it multiplies 8-bit integers: "vpdpbusd", "pmaddubsw", "sdot" (see
    `formats.integer_dot`), or "" for not at all. `bf16_tiles` says that its matrix unit (AMX)
    multiplies tiles of bf16, and that the system lets this process use it.
    """

    triple: str
    cpu: str
    features: str
    vector_bits: int
    registers: int
    bf16_dot: bool
    int8_dot: str
    bf16_tiles: bool = False

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


#: What kernels are written for, by the name of the field.
TARGET_VALUES: dict[str, tuple[object, ...]] = {
    "vector_bits": (128, 256, 512),
    "registers": (16, 32),
    "int8_dot": ("vpdpbusd", "pmaddubsw", "sdot", ""),
}


@functools.cache
def host_target() -> Target:
    """The CPU this process runs on."""
    import llvmlite.binding as llvm

    features = host_features()
    return _describe(
        llvm.get_process_triple(), llvm.get_host_cpu_name(), flattened(features), features
    )


def check_runs_here(target: Target, what: str) -> None:
    """Raises UserError, naming both CPUs, if code for `target` cannot run on this machine.

    The same CPU can; so can a level or a generic CPU whose features this one has.
    """
    host = host_target()
    present = {name for name, there in host_features().items() if there}
    wanted = {name[1:] for name in target.features.split(",") if name.startswith("+")}
    wanted |= _LEVEL_FEATURES.get(target.cpu, set())
    same_kind = target.triple.split("-")[0] == host.triple.split("-")[0]
    known_cpu = target.cpu == host.cpu or target.cpu in _LEVEL_FEATURES
    if same_kind and known_cpu and wanted <= present:
        if target.bf16_tiles and not request_matrix_unit():
            raise UserError(
                f"{what} uses the matrix unit of {target.cpu} (AMX), which this system does not let"
                " processes use: build it here"
            )
        return
    lacking = sorted(wanted - present) if same_kind else []
    why = f", which lacks {', '.join(lacking)}" if lacking else ""
    raise UserError(
        f"{what} is compiled for {target.cpu} ({target.triple}), but this machine is {host.cpu}"
        f" ({host.triple}){why}: build it for this CPU"
    )


_AVX2_LEVEL = {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "sse4.2"}
#: Features of CPU names that stand for a level and not for one CPU
#: (x86-64: https://gitlab.com/x86-psABIs/x86-64-ABI, "micro-architecture levels").
_LEVEL_FEATURES: dict[str, set[str]] = {
    "x86-64-v3": _AVX2_LEVEL,
    "x86-64-v4": _AVX2_LEVEL | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "generic": set(),
    "generic-rv64": set(),
    # Armv8.2 with what the Neoverse N1 adds; later server CPUs have all of it.
    "neoverse-n1": {
        *("aes", "crc", "dotprod", "fp-armv8", "fullfp16", "lse", "neon", "rcpc", "rdm", "sha2")
    },
}


def named_target(cpu: str | None) -> Target:
    """The target with a name of its own, one of NAMED_TARGETS; `host` and None are this machine.

    UserError for others.
    """
    if cpu in (None, "host", "native"):
        return host_target()
    if cpu in NAMED_TARGETS:
        return NAMED_TARGETS[cpu]
    known = ", ".join(["host", *NAMED_TARGETS])
    raise UserError(f"target CPU '{cpu}' is not known; use one of {known}")


def _describe(triple: str, cpu: str, features: str, present: "dict[str, bool]") -> Target:
    """Reads the vector width and register count off a feature table."""
    architecture = triple.split("-")[0]
    if architecture == "x86_64":
        if present.get("avx512f") and present.get("avx512vl") and present.get("avx512bw"):
            int8 = "vpdpbusd" if present.get("avx512vnni") else "pmaddubsw"
            tiles = bool(present.get("amx-bf16")) and request_matrix_unit()
            pairs = bool(present.get("avx512bf16"))
            return Target(triple, cpu, features, 512, 32, pairs, int8, tiles)
        if present.get("avx2") and present.get("fma"):
            int8 = "vpdpbusd" if present.get("avxvnni") else "pmaddubsw"
            return Target(triple, cpu, features, 256, 16, False, int8)
        raise UserError(f"CPU '{cpu}' has neither AVX-512 nor AVX2 with FMA; no kernels for it")
    if architecture in ("aarch64", "arm64"):
        int8 = "sdot" if present.get("dotprod") else ""
        return Target(triple, cpu, features, 128, 32, False, int8)
    if architecture == "riscv64":
        if not present.get("v"):
            raise UserError(f"CPU '{cpu}' has no vectors (RISC-V's V); no kernels for it")
        return Target(triple, cpu, features, 128, 32, False, "")
    raise UserError(f"architecture '{architecture}' has no kernels; use x86_64, aarch64 or riscv64")


#: Targets with names of their own. "host" is not among them.
_LINUX_X86 = "x86_64-unknown-linux-gnu"
NAMED_TARGETS = {
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
