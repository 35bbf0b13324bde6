"""Targets by LLVM's names: any CPU and features of x86-64, AArch64 and RISC-V with vectors.

LLVM itself is asked what a CPU has, be it by its name or by a feature: child processes compile one
multiply-add for the width of its vectors, and one call of each instruction that kernels might use.
They are children since LLVM ends the process of whoever asks for what it does not know.
"""

import subprocess
import sys

from buddy_pipeline.compile.target import NAMED_TARGETS, Target, host_target, named_target
from buddy_pipeline.partition.errors import UserError

_MULTIPLY_ADD = """
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
define void @probe(ptr %a, ptr %b, ptr %c) {
  %x = load <16 x float>, ptr %a
  %y = load <16 x float>, ptr %b
  %z = load <16 x float>, ptr %c
  %r = call <16 x float> @llvm.fma.v16f32(<16 x float> %x, <16 x float> %y, <16 x float> %z)
  store <16 x float> %r, ptr %c
  ret void
}
"""


def _dot(intrinsic: str, result: str, operand: str) -> str:
    """A function that calls a dot product: result + operand · operand."""
    return f"""
declare {result} @llvm.{intrinsic}({result}, {operand}, {operand})
define {result} @probe({result} %c, {operand} %a, {operand} %b) {{
  %r = call {result} @llvm.{intrinsic}({result} %c, {operand} %a, {operand} %b)
  ret {result} %r
}}
"""


_VNNI_512 = _dot("x86.avx512.vpdpbusd.512", "<16 x i32>", "<64 x i8>")
_VNNI_256 = _dot("x86.avx512.vpdpbusd.256", "<8 x i32>", "<32 x i8>")
_BF16_PAIRS = _dot("x86.avx512bf16.dpbf16ps.512", "<16 x float>", "<32 x bfloat>")
_INT8_DOT = _dot("aarch64.neon.sdot.v4i32.v16i8", "<4 x i32>", "<16 x i8>")
_BF16_TILES = """
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)
define void @probe() {
  call void @llvm.x86.tdpbf16ps(i8 0, i8 1, i8 2)
  ret void
}
"""


def chosen_target(triple: str | None, cpu: str | None, features: str | None) -> Target:
    """The target of `--target-triple`, `--target-cpu` and `--target-features`; this machine for
    whatever is not given, or a target with a name of its own (see `compile.target`)."""
    alone = triple is None and features is None
    if cpu == "" or (alone and cpu in (None, *NAMED_TARGETS)):
        return named_target(cpu)
    host = host_target()
    default_cpu = host.cpu if triple is None else _GENERIC.get(triple.split("-")[0], "generic")
    return custom_target(triple or host.triple, cpu or default_cpu, features or "")


#: The CPU of a triple that comes without one, where that is not "generic".
_GENERIC = {"x86_64": "x86-64-v3", "riscv64": "generic-rv64"}


def custom_target(triple: str, cpu: str, features: str) -> Target:
    """The target with these LLVM names; UserError for what LLVM or the kernels do not know."""
    named = f"target '{triple}', CPU '{cpu}', features '{features}'"
    code = _code(triple, cpu, features, named)

    def has(probe: str) -> bool:
        return _compile(triple, cpu, features, probe).returncode == 0

    architecture = triple.split("-")[0]
    if architecture == "x86_64":
        if "zmm" in code:
            int8 = "vpdpbusd" if has(_VNNI_512) else "pmaddubsw"
            pairs = has(_BF16_PAIRS)
            return Target(triple, cpu, features, 512, 32, pairs, int8, has(_BF16_TILES))
        if "ymm" in code and "vfmadd" in code:
            int8 = "vpdpbusd" if has(_VNNI_256) else "pmaddubsw"
            return Target(triple, cpu, features, 256, 16, False, int8)
        raise UserError(f"{named}: this CPU has neither AVX-512 nor AVX2 with FMA; no kernels")
    if architecture in ("aarch64", "arm64"):
        return Target(triple, cpu, features, 128, 32, False, "sdot" if has(_INT8_DOT) else "")
    if architecture == "riscv64":
        if "vfm" not in code:
            raise UserError(f"{named}: this CPU has no vectors; add +v to --target-features")
        return Target(triple, cpu, features, 128, 32, False, "")
    raise UserError(f"{named}: there are kernels for x86_64, aarch64 and riscv64 only")


def check_known(target: Target) -> None:
    """Raises UserError for names that LLVM does not know: a configuration may be edited."""
    if target != host_target() and target not in NAMED_TARGETS.values():
        named = f"target '{target.triple}', CPU '{target.cpu}', features '{target.features}'"
        _code(target.triple, target.cpu, target.features, named)


def _code(triple: str, cpu: str, features: str, named: str) -> str:
    """Assembly of a multiply-add; UserError for names that LLVM does not know."""
    run = _compile(triple, cpu, features, _MULTIPLY_ADD)
    for line in run.stderr.splitlines():
        if "flags should start with" in line:
            raise UserError(f"{named}: each feature begins with + or -, such as +avx2")
        if "is not a recognized" in line:
            raise UserError(f"{named}: {line.split(' (')[0]}; see 'llc -march=... -mcpu=help'")
    if run.returncode != 0:
        last = next((t for t in reversed(run.stderr.splitlines()) if t.strip()), "no output")
        raise UserError(f"{named}: {last}")
    return run.stdout


def _compile(
    triple: str, cpu: str, features: str, probe: str
) -> "subprocess.CompletedProcess[str]":
    """Compiles LLVM IR to assembly in a child, which fails where LLVM cannot."""
    command = [sys.executable, "-m", __name__, triple, cpu, features]
    return subprocess.run(command, input=probe, capture_output=True, text=True, check=False)


def _emit(triple: str, cpu: str, features: str, text: str) -> str:
    """The child's work."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        backend = llvm.Target.from_triple(triple)
    except RuntimeError as error:
        sys.exit(f"LLVM does not know this triple: {error}")
    machine = backend.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic")
    return str(machine.emit_assembly(llvm.parse_assembly(text)))


if __name__ == "__main__":
    triple, cpu, features = sys.argv[1:]
    print(_emit(triple, cpu, features, sys.stdin.read()))
