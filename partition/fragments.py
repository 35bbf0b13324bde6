"""Cutting one partition into fragments: kernels, and the islands of arithmetic between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buddy_pipeline.partition.graph import GraphNode, NodeKind, Partition


@dataclass(frozen=True)
class Fragment:
    """What is compiled as one unit: a kernel (or linears that read the same row), or an island.

    `nodes` are KERNEL nodes or COMPUTE nodes in graph order, without views.
    """

    is_kernel: bool
    nodes: tuple[str, ...]


def resolve(name: str, nodes: Mapping[str, GraphNode]) -> str:
    """The value whose bytes `name` has: views are followed to what they look at."""
    while nodes[name].kind is NodeKind.VIEW:
        name = nodes[name].inputs[0]
    return name


def cut(partition: Partition, nodes: Mapping[str, GraphNode]) -> list[Fragment]:
    """The fragments of `partition` in an order that respects every use.

    Whatever kernel is ready comes first, then all the arithmetic that is ready as one island: so
    `silu(gate)` and `· up` become one island after both projections, not two around one. Linears
    that read the same value become one fragment, one pass over their input.
    """
    inside = set(partition.nodes)
    pending = [n for n in partition.nodes if nodes[n].kind in (NodeKind.KERNEL, NodeKind.COMPUTE)]
    done: set[str] = set()
    fragments: list[Fragment] = []

    def ready(name: str, also: set[str]) -> bool:
        return all(
            source in done or source in also or source not in inside
            for source in (resolve(i, nodes) for i in nodes[name].inputs)
        )

    while pending:
        kernels = [n for n in pending if nodes[n].kind is NodeKind.KERNEL and ready(n, set())]
        if kernels:
            chosen = _same_input(kernels, nodes)
            fragments.append(Fragment(True, tuple(chosen)))
        else:
            island: set[str] = set()
            for name in pending:
                if nodes[name].kind is NodeKind.COMPUTE and ready(name, island):
                    island.add(name)
            chosen = [n for n in pending if n in island]
            fragments.append(Fragment(False, tuple(chosen)))
        if not chosen:
            raise ValueError(f"partition {partition.name} waits for itself at {pending[0]}")
        done.update(chosen)
        pending = [n for n in pending if n not in done]
    return fragments


def _same_input(kernels: Sequence[str], nodes: Mapping[str, GraphNode]) -> list[str]:
    """The first kernel and, if it is a linear, the others that read the same row."""
    first = nodes[kernels[0]]
    row = _linear_row(first, nodes)
    if row is None:
        return [first.name]
    return [n for n in kernels if _linear_row(nodes[n], nodes) == row]


def _linear_row(node: GraphNode, nodes: Mapping[str, GraphNode]) -> str | None:
    """The activation that a linear reads; None for other kernels."""
    if node.op.split(".")[1:2] not in (["linear"], ["addmm"], ["mm"], ["matmul"]):
        return None
    rows = [i for i in node.inputs if nodes[i].kind is not NodeKind.PARAMETER]
    return resolve(rows[0], nodes)
