"""FX nodes read: which are kernels, which only lay bytes out anew, which compute."""

from typing import Any

import numpy as np
import torch
from torch.fx import Node

from buddy_pipeline.partition.graph import GraphNode, NodeKind


def graph_node(
    node: Node, parameters: dict[str, tuple[str, ...]], constants: dict[str, np.ndarray]
) -> GraphNode:
    """An FX node as plain data."""
    inputs = tuple(source.name for source in node.all_input_nodes)
    op = str(node.target) if node.op == "call_function" else ""
    kind = node_kind(node, parameters, constants)
    return GraphNode(node.name, op, inputs, module_path(node), kind)


def module_path(node: Node) -> str:
    """The innermost module whose code made the node, "model.layers.0.mlp"; "" for none."""
    stack = node.meta.get("nn_module_stack") or {}
    path: str = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("model").removeprefix(".")


def node_kind(
    node: Node, parameters: dict[str, tuple[str, ...]], constants: dict[str, np.ndarray]
) -> NodeKind:
    """What an FX node is to the pipeline."""
    if node.op == "output":
        return NodeKind.OUTPUT
    if node.op == "placeholder":
        if node.name in parameters:
            return NodeKind.PARAMETER
        if node.name in constants:
            return NodeKind.CONSTANT
        return NodeKind.TOKENS if node.name == "ids" else NodeKind.POSITIONS
    is_op = is_attention(node) or is_expert_linear(node) or is_top_k(node)
    if is_op or linear_weight(node, parameters) or is_embedding(node, parameters):
        return NodeKind.KERNEL
    if not node.all_input_nodes:
        return NodeKind.CONSTANT
    return NodeKind.VIEW if is_view(node) else NodeKind.COMPUTE


def is_attention(node: Node) -> bool:
    """Whether the node is the attention op."""
    return node.target is torch.ops.bp.attention.default


def is_expert_linear(node: Node) -> bool:
    """Whether the node is the product of rows with the matrices of chosen experts."""
    return node.target is torch.ops.bp.expert_linear.default


def is_top_k(node: Node) -> bool:
    """Whether the node finds the greatest elements of rows."""
    return node.target is torch.ops.bp.top_k.default


def is_embedding(node: Node, parameters: dict[str, tuple[str, ...]]) -> bool:
    """Whether the node gathers rows of a parameter."""
    if node.target is not torch.ops.aten.embedding.default:
        return False
    table, ids = arguments(node)[:2]
    return table.name in parameters and value_of(ids).numel() == 1


def linear_weight(node: Node, parameters: dict[str, tuple[str, ...]]) -> Node | None:
    """The weight of a product of a whole row with a parameter, or None for any other node."""
    if node.target is torch.ops.aten.linear.default:
        row, weight = arguments(node)[:2]
        depth = 1
    elif node.target is torch.ops.aten.addmm.default and len(node.kwargs) == 0:
        row, weight = arguments(node)[1:3]
        depth = 0
    elif node.target in (torch.ops.aten.mm.default, torch.ops.aten.matmul.default):
        row, weight = arguments(node)[:2]
        depth = 0
    else:
        return None
    if not isinstance(weight, Node) or weight.name not in parameters:
        return None
    shape = value_of(weight).shape
    whole = len(shape) == 2 and value_of(row).numel() == shape[depth]
    return weight if whole else None


def linear_bias(node: Node) -> Node | None:
    """The bias of a linear kernel node."""
    if node.target is torch.ops.aten.linear.default:
        bias: Node | None = (*arguments(node), None)[2]
        return bias
    if node.target is torch.ops.aten.addmm.default:
        added: Node = arguments(node)[0]
        return added
    return None


def linear_row(node: Node) -> Node:
    """The activation row that a linear kernel node reads."""
    row: Node = arguments(node)[1 if node.target is torch.ops.aten.addmm.default else 0]
    return row


def is_transposed(node: Node) -> bool:
    """Whether a linear kernel node's weight is stored as [inputs, outputs]."""
    return node.target is not torch.ops.aten.linear.default


_LAYOUT_OPS = {
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.dropout.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.device,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten._to_copy.default,
}
_PERMUTING_OPS = {
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.t.default,
}


def is_view(node: Node) -> bool:
    """Whether the node's value has the same bytes in the same order as its input, for one token."""
    if not node.all_input_nodes or len(node.all_input_nodes) > 1:
        return False
    source, value = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    if source.dtype != value.dtype or source.numel() != value.numel():
        return False
    if node.target in _LAYOUT_OPS:
        return True
    return node.target in _PERMUTING_OPS and _keeps_order(node, source, value)


def is_identity(node: Node) -> bool:
    """Whether the node's value is its input's: a dropout that is off, a conversion to what it is.

    Only some layers have them (GPT-2's first reads the embeddings through a dropout), so they would
    keep layers from being of one structure.
    """
    if not is_view(node):
        return False
    return value_of(node.all_input_nodes[0]).shape == value_of(node).shape


def _keeps_order(node: Node, source: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a permutation moves only dimensions of size 1."""
    rank = source.dim()
    if node.target is torch.ops.aten.permute.default:
        order = [d % rank for d in arguments(node)[1]]
    elif node.target is torch.ops.aten.t.default:
        order = list(reversed(range(rank)))
    else:
        order = list(range(rank))
        a, b = (d % rank for d in arguments(node)[1:3])
        order[a], order[b] = order[b], order[a]
    moved = [d for d in order if source.shape[d] != 1]
    return moved == sorted(moved)


def arguments(node: Node) -> tuple[Any, ...]:
    """A node's positional arguments (FX types them as a union that fits nothing)."""
    return node.args


def module_of(node: Node) -> dict[str, Any]:
    """The part of a node's meta data that says which module made it, for a node in its place."""
    return {name: node.meta[name] for name in ("nn_module_stack",) if name in node.meta}


def value_of(node: Node) -> torch.Tensor:
    """The meta tensor that stands for a node's value."""
    value: torch.Tensor = node.meta["val"]
    return value
