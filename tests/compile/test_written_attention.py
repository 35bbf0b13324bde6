"""Attention written out in a model's class, found in its graph or refused by name."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from buddy_pipeline.compile.export import ExportedModel, export_model
from buddy_pipeline.compile.fx_nodes import arguments, is_attention
from buddy_pipeline.compile.written_attention import fold_written_attention
from buddy_pipeline.partition.errors import UserError
from tests.families.tiny_configs import LAYERS, WINDOW, tiny_config

Change = Callable[[torch.Tensor], torch.Tensor]


class _Written(torch.nn.Module):
    """Two heads of four; `change` is what happens to the scores."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.view(1, 1, 3, 2, 4).unbind(2)
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
        weights = torch.softmax(self.change(scores), dim=-1)
        return (weights @ v.transpose(1, 2)).transpose(1, 2).reshape(1, 1, 8)


def folded(change: Change) -> tuple[torch.fx.Node, dict[str, np.ndarray]]:
    """The attention node that comes of it, and the constants."""
    with torch.no_grad():
        program = torch.export.export(_Written(change), (torch.zeros(1, 1, 24),), strict=False)
    graph = program.graph_module.graph
    slopes = fold_written_attention(graph, {})
    (node,) = (node for node in graph.nodes if is_attention(node))
    assert not [n for n in graph.nodes if "softmax" in str(n.target)]
    return node, slopes


def test_factors_become_the_scale() -> None:
    lowest = torch.finfo(torch.float32).min
    node, slopes = folded(
        lambda scores: torch.max(scores / math.sqrt(4) * 3 + 0.5, torch.full((), lowest))
    )
    assert arguments(node)[5] == pytest.approx(1.5)
    assert not slopes


def test_a_bias_by_distance_becomes_slopes() -> None:
    def change(scores: torch.Tensor) -> torch.Tensor:
        slopes = 2.0 ** -torch.arange(1, 3)
        return scores + slopes[:, None, None] * torch.arange(1)

    _, slopes = folded(change)
    np.testing.assert_array_equal(next(iter(slopes.values())), [0.5, 0.25])


@pytest.mark.parametrize(
    "change",
    [
        torch.tanh,
        lambda scores: scores * scores,
        lambda scores: scores + torch.arange(1) ** 2,
        lambda scores: torch.where(torch.zeros(1, dtype=torch.bool), scores, -1e9),
    ],
)
def test_what_no_kernel_computes_is_refused(change: Change) -> None:
    with pytest.raises(UserError, match="softmax") as error:
        folded(change)
    assert "\n" not in str(error.value)


def exported(model_type: str) -> ExportedModel:
    return export_model(tiny_config(model_type).to_dict())


def attention(model: ExportedModel) -> list[tuple[object, ...]]:
    """The arguments of each attention node."""
    return [arguments(node) for node in model.fx.values() if is_attention(node)]


def test_windows_are_read_from_a_mask_kept_as_a_buffer() -> None:
    assert [found[6] for found in attention(exported("gpt_neo"))] == [0, WINDOW, 0, WINDOW]


def test_alibi_of_a_model() -> None:
    model = exported("bloom")
    slopes = [v for name, v in model.constants.items() if name.startswith("slopes")]
    assert len(slopes) == len(attention(model)) == LAYERS
    np.testing.assert_allclose(slopes[0], [2**-2, 2**-4, 2**-6, 2**-8])


@pytest.mark.parametrize(
    ("model_type", "module"), [("lfm2", "conv"), ("mamba2", "mixer"), ("qwen3_next", "linear_attn")]
)
def test_what_is_carried_from_token_to_token_is_refused(model_type: str, module: str) -> None:
    with pytest.raises(UserError, match=rf"module '[\w.]*{module}'.*no kernel yet"):
        exported(model_type)
