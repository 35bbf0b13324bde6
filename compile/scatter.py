"""Scattering one number, as models mark what they have chosen: made a comparison of places.

torch-mlir turns `aten.scatter` into an operation that upstream MLIR does not know.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from buddy_pipeline.compile.fx_nodes import arguments, module_of, value_of

_ATEN = torch.ops.aten


def compare_places(graph: Graph) -> None:
    """Replaces every `scatter` of a number along the last dimension by `where`: each place of the
    result is compared with all that are written."""
    for node in graph.find_nodes(op="call_function", target=_ATEN.scatter.value):
        x, dim, places, number = arguments(node)
        rank = value_of(x).dim()
        # Of other dimensions the whole must be written.
        whole = value_of(places).shape[:-1] == value_of(x).shape[:-1]
        if dim in (-1, rank - 1) and whole and value_of(x).dtype == torch.float32:
            _replace(graph, node, x, places, number)


def _replace(graph: Graph, node: Node, x: Node, places: Node, number: float) -> None:
    value: Any = value_of(x)  # a FakeTensor

    def call(target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Node:
        made = graph.call_function(target, args, kwargs)
        own = torch.fx.node.map_arg(args, value_of)
        # Without the rest of the node's, such as a type in "tensor_meta".
        made.meta = {**module_of(node), "val": target(*own, **kwargs)}
        return made

    with graph.inserting_before(node), value.fake_mode:
        is_written = _is_written(call, places, value)
        result = call(_ATEN.where.ScalarSelf, is_written, float(number), x)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_written(call: Callable[..., Node], places: Node, value: torch.Tensor) -> Node:
    """For each element of the last dimension: whether it is one of the places."""
    numbers = call(_ATEN.arange.default, value.shape[-1], device=value.device)
    if value_of(places).shape[-1] == 1:
        return call(_ATEN.eq.Tensor, places, numbers)
    each = call(_ATEN.eq.Tensor, call(_ATEN.unsqueeze.default, places, -1), numbers)
    hits = call(_ATEN._to_copy.default, each, dtype=torch.float32)
    return call(_ATEN.gt.Scalar, call(_ATEN.amax.default, hits, [-2]), 0)
