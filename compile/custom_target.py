"""Targets by LLVM's names: any CPU and features of x86-64, AArch64 and RISC-V with vectors.

LLVM itself is asked for the width of its vectors: a child process compiles one multiply-add for the
CPU, since LLVM ends the process of whoever names a CPU that it does not know.
"""

import json
import subprocess
import sys
from dataclasses import asdict

from buddy_pipeline.compile.target import NAMED_TARGETS, Target, host_target, named_target
from buddy_pipeline.partition.errors import UserError

_PROBE = """
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


def chosen_target(triple: str | None, cpu: str | None, features: str | None) -> Target:
    """The target of `--target-triple`, `--target-cpu` and `--target-features`; this machine for
    whatever is not given, or a target with a name of its own (see `compile.target`)."""
    if triple is None and features is None and (cpu is None or cpu in NAMED_TARGETS):
        return named_target(cpu or "host")
    host = host_target()
    default_cpu = host.cpu if triple is None else _GENERIC.get(triple.split("-")[0], "generic")
    return custom_target(triple or host.triple, cpu or default_cpu, features or "")


#: The CPU of a triple that comes without one, where that is not "generic".
_GENERIC = {"x86_64": "x86-64-v3", "riscv64": "generic-rv64"}


def custom_target(triple: str, cpu: str, features: str) -> Target:
    """The target with these LLVM names; UserError for what LLVM or the kernels do not know."""
    arguments = [triple, cpu, features]
    run = subprocess.run(
        [sys.executable, "-m", __name__, *arguments], capture_output=True, text=True, check=False
    )
    named = f"target '{triple}', CPU '{cpu}', features '{features}'"
    for line in run.stderr.splitlines():
        if "flags should start with" in line:
            raise UserError(f"{named}: each feature begins with + or -, such as +avx2")
        if "is not a recognized" in line:
            raise UserError(f"{named}: {line.split(' (')[0]}; see 'llc -march=... -mcpu=help'")
    if run.returncode != 0:
        last = next((t for t in reversed(run.stderr.splitlines()) if t.strip()), "no output")
        raise UserError(f"{named}: {last}")
    return Target(**json.loads(run.stdout))


def _describe(triple: str, cpu: str, features: str) -> Target:
    """The target, with what the multiply-add became; ValueError if that is no vector code."""
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    try:
        backend = llvm.Target.from_triple(triple)
    except RuntimeError as error:
        raise ValueError(f"LLVM does not know this triple: {error}") from None
    machine = backend.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic")
    code = machine.emit_assembly(llvm.parse_assembly(_PROBE))
    architecture = triple.split("-")[0]
    if architecture == "x86_64":
        named = features.split(",")
        int8 = "vpdpbusd" if {"+avx512vnni", "+avxvnni"} & set(named) else "pmaddubsw"
        if "zmm" in code:
            pairs, tiles = "+avx512bf16" in named, "+amx-bf16" in named
            return Target(triple, cpu, features, 512, 32, pairs, int8, tiles)
        if "ymm" in code and "vfmadd" in code:
            return Target(triple, cpu, features, 256, 16, False, int8)
        raise ValueError("this CPU has neither AVX-512 nor AVX2 with FMA; there are no kernels")
    if architecture in ("aarch64", "arm64"):
        int8 = "sdot" if "+dotprod" in features.split(",") else ""
        return Target(triple, cpu, features, 128, 32, False, int8)
    if architecture == "riscv64":
        if "vfm" not in code:
            raise ValueError("this CPU has no vectors; add +v to --target-features")
        return Target(triple, cpu, features, 128, 32, False, "")
    raise ValueError("there are kernels for x86_64, aarch64 and riscv64 only")


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(_describe(*sys.argv[1:]))))
    except ValueError as error:
        sys.exit(str(error))
