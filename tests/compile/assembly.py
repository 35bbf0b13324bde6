"""Assembly text read: functions and their innermost loops."""

import re
from collections.abc import Iterator

import llvmlite.binding as llvm

from buddy_pipeline.compile.codegen import target_machine
from buddy_pipeline.compile.target import Target

_LABEL = re.compile(r"(\.L\w+):")
_REFERENCE = re.compile(r"(?<!\w)\.L\w+")

#: Arithmetic on one float, by architecture.
_SCALAR = {
    "x86_64": r"v?(add|sub|mul|div|max|min|sqrt|rndscale|round|fn?m(add|sub)\d+)ss$",
    "aarch64": r"f(add|sub|mul|div|max|min|maxnm|minnm|sqrt|n?madd|n?msub) s\d",
    "riscv64": r"f(add|sub|mul|div|max|min|sqrt|n?madd|n?msub)\.s$",
}
#: Arithmetic on a whole vector of floats.
_PACKED = {
    "x86_64": r"v?(add|sub|mul|div|max|min|sqrt|fn?m(add|sub)\d+|dpbf16)ps$",
    "aarch64": r"f(add|sub|mul|div|max|min|mla|mls|maxnm|minnm) v\d+\.4s",
    "riscv64": r"vf(add|sub|mul|div|rdiv|max|min|n?macc|n?msac|n?madd|n?msub)\.v[vf]$",
}


class Code:
    """The instructions of one function or loop."""

    def __init__(self, lines: list[str], architecture: str) -> None:
        self.lines = lines
        self._architecture = architecture

    def scalar(self) -> list[str]:
        """The instructions that compute with single floats."""
        return self._matching(_SCALAR[self._architecture])

    def packed(self) -> list[str]:
        """The instructions that compute with vectors of floats."""
        return self._matching(_PACKED[self._architecture])

    def with_word(self, word: str) -> list[str]:
        """The instructions whose text holds a regular expression."""
        return [line for line in self.lines if re.search(word, line)]

    def _matching(self, pattern: str) -> list[str]:
        # On AArch64 the register tells scalars from vectors, elsewhere the mnemonic alone does.
        width = 2 if self._architecture == "aarch64" else 1
        return [line for line in self.lines if re.match(pattern, " ".join(line.split()[:width]))]

    def innermost_loops(self) -> "list[Code]":
        """The loops that hold no other loop: from a label to the last jump back to it."""
        labels = {}
        spans: set[tuple[int, int]] = set()
        for number, line in enumerate(self.lines):
            if match := _LABEL.match(line):
                labels[match[1]] = number
                continue
            for name in _REFERENCE.findall(line):
                if name in labels:
                    spans.add((labels[name], number))
        inner = [
            (low, high)
            for low, high in sorted(spans)
            if not any((low, high) != (a, b) and low <= a and b <= high for a, b in spans)
        ]
        return [Code(self.lines[low : high + 1], self._architecture) for low, high in inner]


def functions(module: llvm.ModuleRef, target: Target) -> dict[str, Code]:
    """The code of an optimised module, by function name."""
    assembly = target_machine(target).emit_assembly(module)
    return dict(_split(assembly, target.triple.split("-")[0]))


def _split(assembly: str, architecture: str) -> Iterator[tuple[str, Code]]:
    name, lines = "", []
    for raw in assembly.splitlines():
        line = raw.partition("#")[0].strip().replace("\t", " ")
        if match := re.match(r"(\w+):", line):
            name, lines = match[1], []
        elif line.startswith(".size"):
            yield name, Code(lines, architecture)
        elif line and (not line.startswith(".") or _LABEL.match(line)):
            lines.append(line)
