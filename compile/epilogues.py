"""Epilogues: arithmetic on a linear's outputs that is done while they are in a near cache.

An island can be one if it works on each column alone, as the gate of a feed-forward and a residual
do. It is then compiled for as many columns as a panel has, and called on whatever panel, or panels
of linears side by side, the linear has just finished.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from buddy_pipeline.compile import fx_nodes
from buddy_pipeline.compile.export import ExportedModel
from buddy_pipeline.compile.islands import Island
from buddy_pipeline.partition.graph import GraphNode, NodeKind


def as_epilogue(
    island: Island,
    linears: Sequence[str],
    panel: int,
    model: ExportedModel,
    table: Mapping[str, GraphNode],
) -> Island | None:
    """The island on a panel's columns, if it can be the epilogue of the linears before it.

    None if it cannot. That nothing else reads the linears' values is for the caller to know.
    """
    width = fx_nodes.value_of(model.fx[linears[0]]).numel()

    def is_row(name: str) -> bool:
        value = fx_nodes.value_of(model.fx[name])
        return value.numel() == width > 1 and value.dtype is torch.float32

    def is_one(name: str) -> bool:
        return fx_nodes.value_of(model.fx[name]).numel() == 1

    loaded = (NodeKind.PARAMETER, NodeKind.CONSTANT)
    is_alike = all(map(is_row, [*linears, *island.outputs]))
    is_read = all(is_one(n) if table[n].kind in loaded else is_row(n) for n in island.inputs)
    is_alone = all(_works_on_each_element(model.fx[n], width) for n in island.nodes)
    return replace(island, columns=panel) if is_alike and is_read and is_alone else None


def _works_on_each_element(node: Node, width: int) -> bool:
    """Whether each element of a node's value, of a row or alone, depends on one of each input."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and fx_nodes.value_of(node).numel() in (1, width)
