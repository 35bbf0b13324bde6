"""`aten.topk` becomes the op and a gather, which say the same."""

import torch
from torch.fx import GraphModule

from buddy_pipeline.compile.top_k_op import split_top_k


def exported(
    shape: tuple[int, ...], count: int, dim: int = -1, largest: bool = True
) -> GraphModule:
    class Choice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            values, places = torch.topk(x, count, dim=dim, largest=largest)
            return values * 2, places

    module = torch.export.export(Choice(), (torch.zeros(shape),)).graph_module
    split_top_k(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def targets(module: GraphModule) -> set[object]:
    return {node.target for node in module.graph.nodes if node.op == "call_function"}


def test_values_are_gathered_from_the_places() -> None:
    module = exported((1, 4, 9), 3)
    found = targets(module)
    assert torch.ops.bp.top_k.default in found and torch.ops.aten.gather.default in found
    assert torch.ops.aten.topk.default not in found
    for node in module.graph.nodes:
        if node.target is torch.ops.bp.top_k.default:
            assert node.meta["val"].shape == (1, 4, 3) and node.meta["val"].dtype == torch.int64
        if node.target is torch.ops.aten.gather.default:
            assert node.meta["val"].shape == (1, 4, 3) and node.meta["val"].dtype == torch.float32


def test_other_choices_stay() -> None:
    """Along another dimension, or of the least: torch-mlir says what it thinks of them."""
    for module in (exported((4, 9), 3, dim=0), exported((4, 9), 3, largest=False)):
        assert torch.ops.aten.topk.default in targets(module)
