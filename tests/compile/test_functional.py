"""Operations in place, made operations with a result or refused."""

from collections.abc import Callable

import pytest
import torch

from buddy_pipeline.compile.functional import make_functional
from buddy_pipeline.partition.errors import UserError
from tests.compile.test_fx_nodes import graph_of

Function = Callable[[torch.Tensor], torch.Tensor]


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y /= 3
    y *= 2
    return y


def part_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    part = y[:, 1:]
    part += 3
    return y


def result_in_place(x: torch.Tensor) -> torch.Tensor:
    values, places = torch.topk(x, 2)
    values /= values.sum()
    return values * places


def column_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    column = y[:, 1]
    column += 3
    return y


def written_parts(x: torch.Tensor) -> torch.Tensor:
    y = x.new_empty(1, 6)
    y[:, :4].copy_(x * 2)
    y[:, 4:].copy_(x[:, :1])
    return y + 1


@pytest.mark.parametrize("function", [in_place, result_in_place])
def test_operations_in_place_get_results(function: Function) -> None:
    x = torch.arange(4.0).reshape(1, 4)
    graph = graph_of(function, x)
    make_functional(graph)
    targets = [str(node.target) for node in graph.nodes]
    assert "aten.div.Tensor" in targets and "aten.mul.Tensor" in targets
    assert not [target for target in targets if "_.Tensor" in target]
    (result,) = torch.fx.GraphModule(torch.nn.Module(), graph)(x)
    torch.testing.assert_close(result, function(x))


def test_a_part_changed_in_place_changes_the_whole() -> None:
    x = torch.arange(4.0).reshape(1, 4)
    graph = graph_of(part_in_place, x)
    make_functional(graph)
    (result,) = torch.fx.GraphModule(torch.nn.Module(), graph)(x)
    torch.testing.assert_close(result, part_in_place(x))


def test_a_part_of_another_kind_changed_in_place_is_refused() -> None:
    graph = graph_of(column_in_place, torch.zeros(1, 4))
    with pytest.raises(UserError, match="in place"):
        make_functional(graph)


def test_parts_that_are_written_make_a_new_whole() -> None:
    x = torch.arange(4.0).reshape(1, 4)
    graph = graph_of(written_parts, x)
    make_functional(graph)
    targets = " ".join(str(node.target) for node in graph.nodes)
    assert "aten.cat" in targets and "copy_" not in targets and "empty" not in targets
    (result,) = torch.fx.GraphModule(torch.nn.Module(), graph)(x)
    torch.testing.assert_close(result, written_parts(x))
