"""Islands: the arithmetic between kernels, imported by torch-mlir as a function of one token."""

import contextlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from buddy_pipeline.compile import fx_nodes
from buddy_pipeline.compile.export import ExportedModel
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.fragments import Fragment, resolve
from buddy_pipeline.partition.graph import GraphNode


@dataclass(frozen=True)
class Island:
    """An island cut free: its inputs and outputs are values outside it, in argument order.

    Inputs may be activations (rows of one token), parameters or constants. Of an epilogue (see
    `epilogues`) rows have `columns` elements, others 0 there.
    """

    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    columns: int = 0


def cut_free(fragment: Fragment, table: Mapping[str, GraphNode], used_later: set[str]) -> Island:
    """Finds what an island reads and which of its values `used_later` names."""
    inside = set(fragment.nodes)
    inputs = dict.fromkeys(
        source
        for name in fragment.nodes
        for source in (resolve(i, table) for i in table[name].inputs)
        if source not in inside
    )
    outputs = tuple(name for name in fragment.nodes if name in used_later)
    return Island(fragment.nodes, tuple(inputs), outputs)


def import_island(island: Island, model: ExportedModel, table: Mapping[str, GraphNode]) -> str:
    """The island as linalg on tensors: MLIR text with one function `@main`.

    That of an epilogue is to be inlined, since a call for each panel would take as long as its
    arithmetic. Raises UserError naming node and module when torch-mlir cannot import an operation.
    """
    subgraph = _column_graph if island.columns else _subgraph
    module = subgraph(island, model, table)
    inline = island.columns > 0
    with contextlib.suppress(Exception):  # of several types; the second try says what is wrong
        return _linalg(module, inline)
    try:
        return _linalg(_decomposed(module), inline)
    except Exception as error:
        # torch-mlir raises several types of its own; all mean an operation it does not know.
        names = {table[n].op for n in island.nodes}
        known = re.search(r"(torch\.aten\.[\w.]+)", str(error))
        raise UserError(
            f"torch-mlir cannot import the arithmetic of module '{table[island.nodes[0]].module}' "
            f"(node {island.nodes[0]}; {known.group(1) if known else ', '.join(sorted(names))})"
        ) from error


def _linalg(module: GraphModule, inline: bool) -> str:
    """What torch-mlir makes of a graph; `inline` asks LLVM to put it where it is called."""
    from torch_mlir import fx, ir

    imported = fx.stateless_fx_import(module, output_type="linalg-on-tensors")
    if inline:
        (main,) = imported.body.operations
        with imported.context:
            main.attributes["passthrough"] = ir.ArrayAttr.get([ir.StringAttr.get("alwaysinline")])
    return str(imported)


def _subgraph(island: Island, model: ExportedModel, table: Mapping[str, GraphNode]) -> GraphModule:
    """A graph of the island's nodes, with the views they look through, and placeholders."""
    graph = Graph()
    copies: dict[str, Node] = {}
    for name in island.inputs:
        copies[name] = graph.placeholder(name)
        copies[name].meta = dict(model.fx[name].meta)

    def copy(name: str) -> Node:
        if name not in copies:
            source = model.fx[name]
            for needed in source.all_input_nodes:
                copy(needed.name)
            copies[name] = _copied(graph, source, lambda n: copies[n.name])
        return copies[name]

    for name in island.nodes:
        copy(name)
    graph.output(tuple(copies[name] for name in island.outputs))
    return GraphModule(torch.nn.Module(), graph)


def _column_graph(
    island: Island, model: ExportedModel, table: Mapping[str, GraphNode]
) -> GraphModule:
    """The same of an epilogue, on some columns of each row: views of a row are the row."""
    graph = Graph()
    copies: dict[str, Node] = {}

    def add(name: str, node: Node) -> None:
        value = fx_nodes.value_of(model.fx[name])
        columns = 1 if value.numel() == 1 else island.columns
        node.meta = {"val": value.new_empty((columns,))}
        copies[name] = node

    for name in island.inputs:
        add(name, graph.placeholder(name))
    for name in island.nodes:
        add(name, _copied(graph, model.fx[name], lambda n: copies[resolve(n.name, table)]))
    graph.output(tuple(copies[name] for name in island.outputs))
    return GraphModule(torch.nn.Module(), graph)


def _copied(graph: Graph, source: Node, copy_of: Callable[[Node], Node]) -> Node:
    """A node with the copies of its inputs; what torch-mlir imports wrongly is written out."""
    if _is_tanh_gelu(source):
        return _tanh_gelu(graph, source, copy_of(source.all_input_nodes[0]))
    return graph.node_copy(source, copy_of)


def _decomposed(module: GraphModule) -> GraphModule:
    """The same with every operation that PyTorch has simpler ones for replaced by those."""
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    simpler: Any = core_aten_decompositions()
    with inputs[0].fake_mode if inputs else FakeTensorMode():
        return make_fx(module, decomposition_table=simpler)(*inputs)


def _is_tanh_gelu(node: Node) -> bool:
    return node.target is torch.ops.aten.gelu.default and node.kwargs.get("approximate") == "tanh"


def _tanh_gelu(graph: Graph, source: Node, x: Node) -> Node:
    """x / 2 · (1 + tanh(√(2/π) · (x + 0.044715·x³))), written out: torch-mlir's own decomposition
    has 0.797724 for √(2/π), wrong from the fourth digit on."""

    def call(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        node.meta = dict(x.meta)
        return node

    mul, add = torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor
    cube = call(mul, call(mul, x, x), x)
    inner = call(add, x, call(mul, cube, 0.044715))
    bend = call(torch.ops.aten.tanh.default, call(mul, inner, math.sqrt(2 / math.pi)))
    return call(mul, call(mul, x, 0.5), call(add, bend, 1.0))


def signature(island: Island, model: ExportedModel, table: Mapping[str, GraphNode]) -> str:
    """A text that is equal for islands of equal structure, whatever their names."""
    numbers = {name: f"i{j}" for j, name in enumerate(island.inputs)}
    lines = [f"{numbers[n]}:{_type(model.fx[n])}" for n in island.inputs]

    def describe(name: str) -> str:
        if name not in numbers:
            node = model.fx[name]
            for source in node.all_input_nodes:
                describe(source.name)
            arguments = torch.fx.node.map_arg(
                (node.args, dict(node.kwargs)), lambda n: numbers[n.name]
            )
            numbers[name] = f"n{len(numbers)}"
            lines.append(f"{numbers[name]}={node.target}{arguments!r}:{_type(node)}")
        return numbers[name]

    for name in island.nodes:
        describe(name)
    lines.append("out " + " ".join(numbers[n] for n in island.outputs))
    if island.columns:
        lines.append(f"on {island.columns} columns")
    return "\n".join(lines)


def _type(node: Node) -> str:
    value: Any = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{value.dtype}"
    return repr(value)
