"""The top-k op: choosing the greatest of a row, such as a token's experts, as one kernel node.

`aten.topk` gives two results, and torch-mlir turns it into a sort that upstream MLIR does not know.
Here the places of the greatest are a kernel, and their values are gathered by ordinary arithmetic.
"""

import operator

import torch
from torch.fx import Graph, Node

from buddy_pipeline.compile.fx_nodes import arguments, module_of, value_of


@torch.library.custom_op("bp::top_k", mutates_args=())
def top_k(x: torch.Tensor, count: int) -> torch.Tensor:
    """Where the `count` greatest elements of each row lie, greatest first, of equal ones the first:
    x [..., elements] to int64 [..., count]. Only traced, never run."""
    raise RuntimeError("bp::top_k is compiled to a kernel and has no eager implementation")


@top_k.register_fake
def _shape_only(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], count), dtype=torch.int64)


def split_top_k(graph: Graph) -> None:
    """Replaces every `aten.topk` along the last dimension by the op and a gather of the values."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default):
        given = dict(zip(("x", "k", "dim", "largest"), arguments(node), strict=False))
        given = {"dim": -1, "largest": True, **given, **node.kwargs}
        x: Node = given["x"]
        is_last = given["dim"] in (-1, value_of(x).dim() - 1)
        if is_last and given["largest"] and value_of(x).dtype == torch.float32:
            _split(graph, node, x, given["k"])


def _split(graph: Graph, node: Node, x: Node, count: int) -> None:
    values, places = node.meta["val"]

    def call(target: torch._ops.OpOverload, args: tuple[object, ...], value: torch.Tensor) -> Node:
        made = graph.call_function(target, args)  # type: ignore[arg-type]
        made.meta = {**module_of(node), "val": value}
        return made

    with graph.inserting_before(node):
        where = call(torch.ops.bp.top_k.default, (x, count), places)
        greatest = call(torch.ops.aten.gather.default, (x, -1, where), values)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with((greatest, where)[arguments(user)[1]])
        graph.erase_node(user)
    graph.erase_node(node)
