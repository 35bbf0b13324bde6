"""Small changes to a graph's nodes: counts over one token, products that are linears."""

from collections.abc import Callable

import torch
from torch.fx import Graph

from buddy_pipeline.compile.fx_nodes import product_as_linear, simplify_count


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def graph_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Graph:
    with torch.no_grad():
        program = torch.export.export(_Module(function), (x,), strict=False)
    return program.graph_module.graph


def test_a_count_over_the_token_is_its_own_number() -> None:
    x = torch.tensor([[7]], dtype=torch.int32)
    graph = graph_of(lambda ids: torch.cumsum(ids, dim=1), x)
    for node in graph.nodes:
        simplify_count(node)
    assert not [node for node in graph.nodes if "cumsum" in str(node.target)]
    (result,) = torch.fx.GraphModule(torch.nn.Module(), graph)(x)
    assert result.dtype is torch.int64 and result.tolist() == [[7]]


def test_a_sum_of_activations_is_left_alone() -> None:
    graph = graph_of(lambda x: torch.cumsum(x, dim=1), torch.zeros(1, 1))
    for node in graph.nodes:
        simplify_count(node)
    assert [node for node in graph.nodes if "cumsum" in str(node.target)]


class _Product(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


def test_a_product_with_a_transposed_parameter_is_a_linear() -> None:
    program = torch.export.export(_Product(), (torch.zeros(1, 1, 4),), strict=False)
    graph, names = program.graph_module.graph, program.graph_signature.inputs_to_parameters
    for node in graph.nodes:
        product_as_linear(node, {name: (path,) for name, path in names.items()})
    (linear,) = (n for n in graph.nodes if n.target is torch.ops.aten.linear.default)
    assert [tuple(n.meta["val"].shape) for n in linear.all_input_nodes] == [(1, 1, 4), (3, 4)]
