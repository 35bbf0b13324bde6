"""Operations that change their operand, made operations with a result.

What an exported graph reads after `x.div_(2)` is the node of `div_` itself, so that only has to
become `div`. A part that is written, `x[..., :4].copy_(y)`, is another matter: what reads `x` later
has to read a value in which the part is another.
"""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from buddy_pipeline.compile.fx_nodes import arguments, module_path, value_of
from buddy_pipeline.partition.errors import UserError

_ATEN = torch.ops.aten
#: Operations whose result shares memory with a part of their operand.
_PARTS = {
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.narrow.default,
    _ATEN.unbind.int,
    _ATEN.chunk.default,
    _ATEN.split.Tensor,
    _ATEN.split_with_sizes.default,
    operator.getitem,
}


def make_functional(graph: Graph) -> None:
    """Replaces every operation in place; UserError naming node and module where that is more than
    the two cases above."""
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        changed = node.args[0] if node.args else None
        if not isinstance(changed, Node):
            raise _refusal(node)
        part = changed if changed.target is _ATEN.slice.Tensor else None
        if node.target is _ATEN.copy_.default and part is not None:
            _write_part(graph, node, part, arguments(node)[1])
            graph.erase_node(node)
        elif part is not None and len(arguments(part)[0].users) > 1:
            _give_result(node)
            _write_part(graph, node, part, node)
        else:
            _check_alone(node, changed)
            _give_result(node)
    for node in list(graph.nodes):
        if node.target is _ATEN.slice_scatter.default:
            _join_parts(graph, node)
    graph.eliminate_dead_code()


def _give_result(node: Node) -> None:
    """`div_` becomes `div`."""
    assert isinstance(node.target, torch._ops.OpOverload)
    name = node.target._schema.name.removeprefix("aten::")
    packet = getattr(_ATEN, name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        raise _refusal(node)
    node.target = getattr(packet, node.target._schema.overload_name or "default")


def _check_alone(node: Node, changed: Node) -> None:
    """What is changed must not be a part of a value that others read too."""
    while changed.op == "call_function" and changed.target in _PARTS:
        source = changed.all_input_nodes[0]
        if changed.target is operator.getitem and source.target not in _PARTS:
            return  # one of several results, such as those of `topk`
        if len(source.users) > 1:
            raise _refusal(node)
        changed = source


def _write_part(graph: Graph, node: Node, part: Node, source: Node) -> None:
    """What reads the whole of `part` after `node` reads one in which `source` is written there."""
    whole, *where = arguments(part)
    earlier = _before(graph, node)
    others = [user for user in whole.users if user is not part and user in earlier]
    if any(o.target in _PARTS and o.users.keys() - earlier for o in others):
        raise _refusal(node)
    if node is not source and node.users:
        raise _refusal(node)
    with graph.inserting_after(node):
        written = _add(graph, node, _ATEN.slice_scatter.default, whole, source, *where)
    if value_of(source).shape != value_of(part).shape:
        with graph.inserting_before(written):
            shape = list(value_of(part).shape)
            wide = _add(graph, node, _ATEN.expand.default, source, shape)
        written.replace_input_with(source, wide)
    for user in list(whole.users):
        if user not in earlier and user is not written:
            user.replace_input_with(whole, written)


def _join_parts(graph: Graph, last: Node) -> None:
    """A new tensor written part by part along one dimension is the parts side by side."""
    size = value_of(last)
    dim = _written(last)[1]
    parts: list[tuple[int, int, Node]] = []
    node = last
    while node.target is _ATEN.slice_scatter.default and _written(node)[1] == dim:
        source, _, start, end = _written(node)
        parts.insert(0, (start, end, source))
        node = arguments(node)[0]
    edges = [0, *(end for _, end, _ in parts)]
    whole = edges[-1] == size.shape[dim] and [start for start, _, _ in parts] == edges[:-1]
    if node.target not in (_ATEN.new_empty.default, _ATEN.empty.memory_format) or not whole:
        return
    with graph.inserting_before(last):
        joined = _add(graph, last, _ATEN.cat.default, [part for _, _, part in parts], dim)
    last.replace_all_uses_with(joined)


def _written(node: Node) -> tuple[Node, int, int, int]:
    """What a `slice_scatter` writes: the source, and dimension, start and end of the part."""
    whole, source, dim, start, end = (*arguments(node), *(0, None, None)[len(node.args) - 2 :])[:5]
    size = value_of(whole).shape[dim]
    return source, dim % value_of(whole).dim(), start or 0, size if end is None else min(end, size)


def _add(graph: Graph, like: Node, target: torch._ops.OpOverload, *args: Any) -> Node:
    added = graph.call_function(target, args)
    value = target(*torch.fx.node.map_arg(args, value_of))
    added.meta = {"val": value, "nn_module_stack": like.meta.get("nn_module_stack")}
    return added


def _before(graph: Graph, node: Node) -> set[Node]:
    """The nodes that run before this one."""
    before = set()
    for other in graph.nodes:
        if other is node:
            break
        before.add(other)
    return before


def _refusal(node: Node) -> UserError:
    return UserError(
        f"node {node.name} of module '{module_path(node)}' changes a value in place with "
        f"{node.target}, which has no kernel yet"
    )
