"""`aten.scatter` of a number becomes a comparison that says the same."""

import pytest
import torch
from torch.fx import GraphModule

from buddy_pipeline.compile.scatter import compare_places


def exported(places: torch.Tensor, number: float, dim: int = -1, width: int = 9) -> GraphModule:
    class Marks(torch.nn.Module):
        def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return torch.scatter(x, dim, places, number)

    module = torch.export.export(Marks(), (torch.zeros(2, width), places)).graph_module
    compare_places(module.graph)
    module.graph.lint()
    module.recompile()
    return module


@pytest.mark.parametrize("number", [1.0, -2.5, float("-inf")])
@pytest.mark.parametrize("places", [[[3, 0, 8], [5, 5, 1]], [[2], [8]]])
def test_marks_are_where_scatter_puts_them(number: float, places: list[list[int]]) -> None:
    written = torch.tensor(places)
    module = exported(written, number)
    assert not [n for n in module.graph.nodes if "scatter" in str(n.target)]
    x = torch.arange(18.0).reshape(2, 9)
    (marked,) = module(x, written)
    torch.testing.assert_close(marked, torch.scatter(x, -1, written, number), rtol=0, atol=0)


def test_of_one_element_it_is_that_one() -> None:
    module = exported(torch.tensor([[0], [0]]), 1.0, width=1)
    (marked,) = module(torch.zeros(2, 1), torch.tensor([[0], [0]]))
    assert (marked == 1).all()


def test_along_another_dimension_it_stays() -> None:
    module = exported(torch.tensor([[1, 0, 1]]), 1.0, dim=0)
    assert [n for n in module.graph.nodes if "scatter" in str(n.target)]
