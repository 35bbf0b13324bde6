"""Epilogues: arithmetic on a linear's outputs that is done while they are in a near cache.

An island can be one if it works on each column alone, as the gate of a feed-forward and a residual
do. It is then compiled for as many columns as a panel has, and called on whatever panel the linear
has just finished, or on one of each part: linears side by side, or the halves of one.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from buddy_pipeline.compile import fx_nodes
from buddy_pipeline.compile.export import ExportedModel
from buddy_pipeline.compile.islands import Island
from buddy_pipeline.partition.graph import GraphNode, NodeKind

#: What takes elements of its one input, and computes nothing.
_TAKING_OPS = {
    operator.getitem,
    torch.ops.aten.chunk.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unbind.int,
}


@dataclass(frozen=True)
class Epilogue:
    """What linears do besides."""

    island: Island
    """On the columns of a panel."""
    parts: Mapping[str, int]
    """Which of the equal parts of the linears' outputs each value is that it reads."""

    @property
    def turns(self) -> int:
        """Parts whose panels take turns."""
        return max(self.parts.values()) + 1


def as_epilogue(
    island: Island,
    linears: Sequence[str],
    panel: int,
    model: ExportedModel,
    table: Mapping[str, GraphNode],
) -> Epilogue | None:
    """The island as the epilogue of the linears right before it; None if it cannot be one.

    That nothing else reads the linears' values is for the caller to know.
    """
    parts = _parts(island, linears, panel, model)
    nodes = tuple(name for name in island.nodes if _is_pointwise(model.fx[name]))
    if not parts or not nodes or parts.keys() & set(island.outputs):
        return None
    width = fx_nodes.value_of(model.fx[next(iter(parts))]).numel()
    inputs = (*parts, *(name for name in island.inputs if name not in linears))

    def is_row(name: str) -> bool:
        value = fx_nodes.value_of(model.fx[name])
        return value.numel() == width > 1 and value.dtype is torch.float32

    def is_one(name: str) -> bool:
        return fx_nodes.value_of(model.fx[name]).numel() == 1

    loaded = (NodeKind.PARAMETER, NodeKind.CONSTANT)
    is_read = all(is_one(n) if table[n].kind in loaded else is_row(n) for n in inputs)
    is_alone = all(fx_nodes.value_of(model.fx[n]).numel() in (1, width) for n in nodes)
    if not (is_read and is_alone and all(map(is_row, island.outputs))):
        return None
    return Epilogue(Island(nodes, inputs, island.outputs, panel), parts)


def _parts(
    island: Island, linears: Sequence[str], panel: int, model: ExportedModel
) -> dict[str, int]:
    """The equal parts of the linears' outputs that an island works on; none where it does not."""
    if all(_is_pointwise(model.fx[name]) for name in island.nodes):
        return {name: number for number, name in enumerate(linears)}
    taken = _taken(island, linears[0], model) if len(linears) == 1 else {}
    width = min((columns.numel() for columns in taken.values()), default=0)
    total = fx_nodes.value_of(model.fx[linears[0]]).numel()
    if width == 0 or total % width or width % panel:
        return {}
    ranges = torch.arange(total).split(width)
    parts = {
        name: number
        for name, columns in taken.items()
        for number, columns_of_part in enumerate(ranges)
        if torch.equal(columns.flatten(), columns_of_part)
    }
    is_all = len(parts) == len(taken) and len(set(parts.values())) == len(ranges)
    return parts if is_all else {}


def _taken(island: Island, linear: str, model: ExportedModel) -> dict[str, torch.Tensor]:
    """Which columns of a linear's outputs the values have that an island makes without arithmetic;
    none if it makes any from something else."""
    shape = fx_nodes.value_of(model.fx[linear]).shape

    def evaluate(node: Node) -> Any:
        if node.name == linear:
            return torch.arange(shape.numel()).reshape(shape)
        if node.target not in _TAKING_OPS and not fx_nodes.is_view(node):
            raise LookupError
        arguments, named = torch.fx.node.map_arg((node.args, dict(node.kwargs)), evaluate)
        return node.target(*arguments, **named)  # type: ignore[operator]

    try:
        values = {n: evaluate(model.fx[n]) for n in island.nodes if not _is_pointwise(model.fx[n])}
    except LookupError:
        return {}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _is_pointwise(node: Node) -> bool:
    """Whether each element of a node's value depends on one of each input."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
