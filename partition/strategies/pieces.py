"""A layer's graph nodes as pieces: what every split strategy is made from.

A layer's modules run one after the other, so cutting where the innermost module below the layer
changes keeps the graph's order. Nothing here knows a model: only the attention kernel's place and
the layer's own (residual) arithmetic are looked for.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from buddy_pipeline.partition.graph import ATTENTION_OP, GraphNode, NodeKind

#: The name of arithmetic that the layer does itself, between its modules.
RESIDUAL = "residual"


@dataclass(frozen=True)
class Piece:
    """Consecutive nodes of a layer that become one partition."""

    name: str  # unique in the layer: "self_attn", "residual", "residual2", ...
    nodes: tuple[GraphNode, ...]

    @property
    def attends(self) -> bool:
        """Whether the attention kernel is in it."""
        return any(node.op == ATTENTION_OP for node in self.nodes)

    @property
    def has_weights(self) -> bool:
        """Whether a kernel other than attention is in it."""
        return any(n.kind is NodeKind.KERNEL and n.op != ATTENTION_OP for n in self.nodes)

    @property
    def is_residual(self) -> bool:
        """Whether it is the layer's own arithmetic."""
        return self.name.startswith(RESIDUAL)


@dataclass(frozen=True)
class Layer:
    """A layer to be split: the path of its module and its nodes in graph order."""

    path: str  # "model.layers.3"
    nodes: tuple[GraphNode, ...]


Splitter = Callable[[Layer], list[Piece]]
"""Cuts a layer into pieces that together are its nodes, in order."""


def by_module(layer: Layer) -> list[Piece]:
    """A piece for each run of nodes in one direct child module of the layer, named like it."""
    return by_part(layer, lambda inside: inside.split(".")[0] or RESIDUAL)


def by_part(layer: Layer, part: Callable[[str], str]) -> list[Piece]:
    """A piece for each run of nodes for which `part` is the same, named by it.

    `part` gets a node's module below the layer: "mlp.act_fn", "" for the layer's own nodes. Runs
    that only lay bytes out anew join the piece before them (or, at the start, behind them).
    """

    def part_of(node: GraphNode) -> str:
        return part(_inside(layer.path, node))

    runs = [list(run) for _, run in groupby(layer.nodes, key=part_of)]
    joined: list[list[GraphNode]] = []
    waiting: list[GraphNode] = []
    for run in runs:
        if any(node.kind is not NodeKind.VIEW for node in run):
            joined.append(waiting + run)
            waiting = []
        elif joined:
            joined[-1] += run
        else:
            waiting += run
    if waiting:
        joined.append(waiting)
    pieces = [Piece(part_of(_first_working(run)), tuple(run)) for run in joined]
    return join((piece.name, [piece]) for piece in pieces)


def join(groups: Iterable[tuple[str, Sequence[Piece]]]) -> list[Piece]:
    """One piece for each (name, neighbouring pieces); a name's second use gets a 2 behind it."""
    pieces: list[Piece] = []
    used: dict[str, int] = {}
    for name, parts in groups:
        used[name] = used.get(name, 0) + 1
        shown = name if used[name] == 1 else f"{name}{used[name]}"
        pieces.append(Piece(shown, tuple(node for part in parts for node in part.nodes)))
    return pieces


def _first_working(run: Sequence[GraphNode]) -> GraphNode:
    """A run's first node that computes."""
    return next((node for node in run if node.kind is not NodeKind.VIEW), run[0])


def _inside(path: str, node: GraphNode) -> str:
    """A node's module below the layer's; "" for the layer's own nodes."""
    return node.module.removeprefix(f"{path}.") if node.module.startswith(f"{path}.") else ""
