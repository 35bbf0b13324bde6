"""A model's graph as plain data: nodes with names and inputs, and the partitions cut from them.

No torch here: `compile/` turns an exported FX graph into `GraphNode`s, so that ownership and the
verifier work on, and are tested with, graphs from anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

ATTENTION_OP = "bp.attention.default"
"""The op of every attention node, whatever the model."""


class NodeKind(Enum):
    """What a node is to the pipeline."""

    TOKENS = "tokens"  # the token ids of a step, in every rank's message header
    POSITIONS = "positions"  # the positions of the tokens, in every rank's message header
    PARAMETER = "parameter"  # a trained weight: loaded by the ranks that use it
    CONSTANT = "constant"  # a buffer or scalar that a rank can make by itself
    KERNEL = "kernel"  # linear, attention, experts, …: compiled by an emitter of ours
    VIEW = "view"  # another layout of the same bytes as `inputs[0]`, for one token
    COMPUTE = "compute"  # elementwise arithmetic and reductions: compiled in islands
    OUTPUT = "output"  # the graph's result: names values, computes nothing

    @property
    def is_owned(self) -> bool:
        """Whether such a node belongs to a partition; the others are wherever they are used."""
        return self in (NodeKind.KERNEL, NodeKind.VIEW, NodeKind.COMPUTE)


@dataclass(frozen=True)
class GraphNode:
    """One value of the graph, and how it is made."""

    name: str  # unique in the graph
    op: str  # "aten.linear.default", "bp.attention.default", ...; "" for what is not called
    inputs: tuple[str, ...]  # names of earlier nodes, in argument order
    module: str  # path of the innermost module, "model.layers.3.mlp.act_fn"; "" if none
    kind: NodeKind


Unit = int | Literal["positions", "prelude", "postlude"]
"""The part of a model that a partition holds: a layer index, or what lies outside the layers."""


@dataclass(frozen=True)
class Partition:
    """Nodes that are compiled together and run on one rank (or on every rank, if `replicated`).

    `inputs` are the values read from outside: those of other partitions, and the token ids or
    positions. `outputs` are the values that another partition or the graph's output reads. Both are
    in graph order and name neither parameters nor constants, which are loaded, not passed.
    """

    name: str  # "positions", "prelude", "layer3" or "layer3.self_attn", "postlude"
    unit: Unit
    nodes: tuple[str, ...]  # in graph order
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    replicated: bool


def node_table(nodes: Sequence[GraphNode]) -> dict[str, GraphNode]:
    """The nodes by name; ValueError if a name is not unique or an input names no node."""
    table: dict[str, GraphNode] = {}
    for node in nodes:
        if node.name in table:
            raise ValueError(f"graph node {node.name!r} exists twice")
        table[node.name] = node
    for node in nodes:
        for name in node.inputs:
            if name not in table:
                raise ValueError(f"graph node {node.name!r} reads {name!r}, which does not exist")
    return table


def position_only(nodes: Sequence[GraphNode]) -> frozenset[str]:
    """Names of the owned nodes that depend on positions and constants alone, such as rotary tables.

    Every rank knows the positions of a step, so it is cheaper to compute these again on each rank
    than to send them. `nodes` must be in graph order.
    """
    free = {n.name for n in nodes if n.kind in (NodeKind.POSITIONS, NodeKind.CONSTANT)}
    found = set()
    for node in nodes:
        if node.kind.is_owned and free.issuperset(node.inputs):
            free.add(node.name)
            found.add(node.name)
    return frozenset(found)
