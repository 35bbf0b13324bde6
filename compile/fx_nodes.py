"""FX nodes read: which are kernels, which only lay bytes out anew, which compute."""

from typing import Any

import numpy as np
import torch
from torch.fx import Graph, Node

from buddy_pipeline.partition.errors import UserError
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


def check_sizes(node: Node) -> None:
    """Raises UserError for a tensor whose size is only known when the model runs."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not all(isinstance(size, int) for size in value.shape):
        raise UserError(
            f"node {node.name} of module '{module_path(node)}' has a size that depends on values, "
            "which has no kernel yet"
        )


def simplify_count(node: Node) -> None:
    """Turns a running count of whole numbers over the one token into the token's own number, as
    classes make positions of a mask."""
    if node.target is not torch.ops.aten.cumsum.default or value_of(node).is_floating_point():
        return
    numbers, dim = arguments(node)[:2]
    if value_of(node).shape[dim] == 1:
        node.target = torch.ops.aten._to_copy.default
        node.args, node.kwargs = (numbers,), {"dtype": value_of(node).dtype}


def share_position_values(graph: Graph, constants: dict[str, np.ndarray]) -> None:
    """Leaves one of the nodes that compute the same of the position, as when every layer scales its
    queries by it; they run together, before all layers."""
    free: set[Node] = set()
    known: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name == "positions" or node.name in constants:
                free.add(node)
        elif node.op == "call_function" and free.issuperset(node.all_input_nodes):
            free.add(node)
            if is_view(node) or not node.all_input_nodes:
                continue  # costs nothing, and its place in the graph keeps layers alike
            first = known.setdefault(f"{node.target} {node.args!r} {node.kwargs!r}", node)
            if first is not node:
                node.replace_all_uses_with(first)


def product_as_linear(node: Node, parameters: dict[str, tuple[str, ...]]) -> None:
    """Turns a product with a transposed parameter into a linear of it as it is stored."""
    aten = torch.ops.aten
    if node.target is aten.addmm.default and not node.kwargs:
        bias, row, weight = arguments(node)
    elif node.target in (aten.mm.default, aten.matmul.default):
        (row, weight), bias = arguments(node), None
    else:
        return
    if weight.target not in _PERMUTING_OPS or value_of(weight).dim() != 2:
        return
    stored = weight.all_input_nodes[0]
    swapped = tuple(reversed(value_of(stored).shape)) == tuple(value_of(weight).shape)
    if stored.name in parameters and swapped and (bias is None or bias.name in parameters):
        node.target = aten.linear.default
        node.args = (row, stored) if bias is None else (row, stored, bias)


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
    """Whether the node gathers a row of a parameter, another one for every token."""
    if node.target is not torch.ops.aten.embedding.default:
        return False
    table, ids = arguments(node)[:2]
    return table.name in parameters and value_of(ids).numel() == 1 and _reads_a_token(ids)


def _reads_a_token(node: Node) -> bool:
    """Whether a value depends on any input of the graph."""
    return node.op == "placeholder" or any(map(_reads_a_token, node.all_input_nodes))


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
    torch.ops.aten.numpy_T.default,
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
    elif node.target in (torch.ops.aten.t.default, torch.ops.aten.numpy_T.default):
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
