"""Kernels of other architectures run: a C program with the linear kernel in it, under qemu-user.

The same program runs natively on this machine, which shows that it is right where no emulator is.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from buddy_pipeline.compile.formats import FORMATS
from buddy_pipeline.compile.kernels import linear
from buddy_pipeline.compile.target import Target, host_target, named_target
from tests.compile.harness import kernel_object, panels_of, row_stride, rows_of, run_linear

PROGRAM = Path(__file__).with_name("linear_program.c")
TOKENS, OUTPUTS = 5, 70


@dataclass(frozen=True)
class Machine:
    """A target, and what builds and runs programs for it; no emulator for this machine."""

    target: Target
    compiler: str
    emulator: str | None
    cpu: str = "max"  # qemu's name of one that has what the target's code uses

    def tools(self) -> tuple[str, list[str]]:
        """The compiler and the words before a program; skips the test where one is missing."""
        compiler = shutil.which(self.compiler)
        if compiler is None:
            pytest.skip(f"needs a C compiler and linker for the target: {self.compiler}")
        if self.emulator is None:
            return compiler, []
        found = shutil.which(self.emulator) or shutil.which(f"{self.emulator}-static")
        if found is None:
            pytest.skip(f"needs qemu's user mode for the target: {self.emulator}")
        return compiler, [found, "-cpu", self.cpu]


MACHINES = {
    "host": Machine(host_target(), "cc", None),
    "aarch64": Machine(named_target("aarch64"), "aarch64-linux-gnu-gcc", "qemu-aarch64"),
    "neoverse-n1": Machine(named_target("neoverse-n1"), "aarch64-linux-gnu-gcc", "qemu-aarch64"),
    "riscv64": Machine(
        named_target("riscv64"),
        "riscv64-linux-gnu-gcc",
        "qemu-riscv64",
        "rv64,v=true,vlen=256",
    ),
}


#: Integer dot products are exact, so what multiplies bytes agrees with what does so elsewhere.
CASES = [(name, form) for name in MACHINES for form in ("f32", "f16", "w8a32")]
CASES += [(name, form) for name in ("host", "neoverse-n1") for form in ("w8a8", "q8_0")]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_the_linear_kernel_gives_the_same_bits_on_every_machine(
    name: str, form: str, tmp_path: Path
) -> None:
    """Every output is one chain of multiply-adds over the depth, whatever the vectors."""
    machine = MACHINES[name]
    compiler, emulator = machine.tools()
    random = np.random.default_rng(3)
    depth = 96 if form == "q8_0" else 77  # whole blocks only, or a tail
    x = random.standard_normal((TOKENS, depth), np.float32)
    weight = random.standard_normal((OUTPUTS, depth), np.float32)
    bias = random.standard_normal(OUTPUTS, np.float32)
    words, arrays = _arguments(machine.target, form, x, weight, bias)

    symbol = linear.linear_name(FORMATS[form])
    text = linear.emit_linear(machine.target, FORMATS[form])
    (tmp_path / "kernel.o").write_bytes(kernel_object(text, symbol, machine.target))
    (tmp_path / "in").write_bytes(words.tobytes() + b"".join(a.tobytes() for a in arrays))
    build = [compiler, "-static", f"-DKERNEL={symbol}", PROGRAM, tmp_path / "kernel.o"]
    subprocess.run([*build, "-o", tmp_path / "program"], check=True)
    run = [*emulator, tmp_path / "program", tmp_path / "in", tmp_path / "out"]
    subprocess.run(run, check=True, timeout=60)

    out = np.fromfile(tmp_path / "out", np.float32).reshape(TOKENS, -1)[:, :OUTPUTS]
    assert np.array_equal(out, run_linear(host_target(), x, weight, bias, form=form))


def _arguments(
    target: Target, form: str, x: np.ndarray, weight: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The sizes that the program wants, and x, packed weights and padded bias."""
    depth = x.shape[1]
    packed = panels_of(FORMATS[form].from_f32(weight), depth, target, FORMATS[form])
    width = len(packed) * target.panel
    padded = np.zeros(width, np.float32)
    padded[:OUTPUTS] = bias
    rows, stride = rows_of(x), row_stride(width)
    arrays = [rows, packed, padded]
    words = [
        *(array.nbytes for array in arrays),
        TOKENS * stride * 4,
        linear.linear_scratch_bytes(target, FORMATS[form], depth),
        rows.shape[1],
        stride,
        TOKENS,
        depth,
        len(packed),
    ]
    return np.array(words, np.int64), arrays
