"""Readable entry points: for each partition and phase a function that names its code.

Graphs are exported with one token and templates take any number of them, so prefill and decode run
the same code; each phase still gets a file of its own, which says so and calls it.
"""

from collections.abc import Sequence

from buddy_pipeline.compile.manifest import PartitionPlan, Plan
from buddy_pipeline.compile.mlir_text import Text
from buddy_pipeline.partition.counted import counted

PHASES = ("prefill", "decode")

_ARGUMENTS = (("args", "!llvm.ptr"), ("step", "!llvm.ptr"), ("tid", "i64"))
_TYPES = ", ".join(kind for _, kind in _ARGUMENTS)


def subgraph_name(number: int, phase: str) -> str:
    """The symbol, and file name without suffix, of one partition in one phase."""
    return f"subgraph0_{phase}{number}"


def forward_name(phase: str) -> str:
    """The symbol, and file name without suffix, of a phase's combined entry point."""
    return f"forward_{phase}"


def emit_subgraph(plan: Plan, number: int, phase: str, source: str) -> str:
    """MLIR of one partition's entry; `source` is where its code's MLIR is, for the reader."""
    partition = plan.partitions[number]
    template = plan.templates[partition.template]
    t = Text()
    t.line(f"// Partition {number}, {partition.name}, {phase}: [tokens, row] to [tokens, row].")
    t.line(f"// Its code is @{template.symbol} in {source}, for any number of tokens.")
    t.line("// Words of the table %args:")
    for line in describe_arguments(plan, partition):
        t.line(f"//   {line}")
    t.line(f"func.func private @{template.symbol}({_TYPES})")
    with t.function(subgraph_name(number, phase), _ARGUMENTS):
        t.call(template.symbol, [(f"%{name}", kind) for name, kind in _ARGUMENTS])
        t.line("return")
    return str(t)


def emit_forward(plan: Plan, numbers: Sequence[int], phase: str) -> str:
    """MLIR of a phase's combined entry: the partitions one after the other.

    `%tables` holds the address of each one's args table, in the same order.
    """
    t = Text()
    partitions = counted(len(numbers), "partition")
    t.line(f"// {phase}: {partitions} in pipeline order, by every thread of a team.")
    for number in numbers:
        t.line(f"func.func private @{subgraph_name(number, phase)}({_TYPES})")
    arguments = [("tables", "!llvm.ptr"), *_ARGUMENTS[1:]]
    with t.function(forward_name(phase), arguments):
        for place, number in enumerate(numbers):
            t.line(f"// {plan.partitions[number].name}")
            table = t.word("%tables", place, "!llvm.ptr")
            values = [(table, "!llvm.ptr"), ("%step", "!llvm.ptr"), ("%tid", "i64")]
            t.call(subgraph_name(number, phase), values)
        t.line("return")
    return str(t)


def describe_arguments(plan: Plan, partition: PartitionPlan) -> list[str]:
    """A line for each word of a partition's args table."""
    lines = []
    for kind, names in (("input", partition.inputs), ("output", partition.outputs)):
        for name in names:
            value = plan.values[name]
            lines.append(f"{kind} {name}: {value.dtype} [tokens, {value.elements}]")
    for parameter in partition.parameters:
        parts = " | ".join(part.weight[0] for part in parameter.parts)
        lines.append(f"parameter {parts}: {parameter.layout}")
    lines += [f"constant {name}" for name in partition.constants]
    scratch = plan.templates[partition.template].scratch
    lines += [f"temporary: {row_bytes} bytes a token" for row_bytes in scratch]
    lines += [
        f"KV offset: {counted(kv.heads, 'head')} of {kv.key}, {kv.value}" for kv in partition.kv
    ]
    return [f"{word} {line}" for word, line in enumerate(lines)]
