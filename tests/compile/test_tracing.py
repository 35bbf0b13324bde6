"""What a model has around it while it is traced, and what it is told of masks and weights."""

import pytest
import torch

from buddy_pipeline.compile.export import export_model
from buddy_pipeline.compile.fx_nodes import arguments, is_attention
from buddy_pipeline.compile.tracing import GraphOfOneToken, TracingCache
from buddy_pipeline.partition.errors import UserError
from tests.families.tiny_configs import WINDOW, tiny_config


def test_keys_and_values_go_through() -> None:
    cache = TracingCache(torch.tensor(7))
    key, value = torch.zeros(1, 2, 1, 4), torch.ones(1, 2, 1, 3)
    kept = cache.update(key, value, 0)
    assert kept[0] is key and kept[1] is value
    assert cache.get_seq_length() == 7 and cache.get_mask_sizes(1, 0) == (1, 0)


@pytest.mark.parametrize(
    "keep",
    [
        lambda cache: cache.get_conv_state(3),
        lambda cache: cache.update_conv_state(torch.zeros(1), 3),
        lambda cache: cache.get_recurrent_state(3),
        lambda cache: cache.update_recurrent_state(torch.zeros(1), 3),
        lambda cache: cache.update_indexer(torch.zeros(1), 3),
        lambda cache: cache.has_previous_state(3),
    ],
)
def test_whatever_else_is_kept_is_refused(keep: object) -> None:
    with pytest.raises(UserError, match=r"layer 3 has .* no kernel yet"):
        keep(TracingCache(0))  # type: ignore[operator]


def test_calls_that_a_graph_of_one_token_cannot_hold() -> None:
    position, x = torch.tensor(5), torch.arange(12.0).reshape(1, 3, 4)
    with GraphOfOneToken():
        assert torch.arange(position, position + 1).tolist() == [5]
        assert torch.arange(2, 4).tolist() == [2, 3]
        assert torch.tensor(0.5, dtype=torch.float64).dtype is torch.float64
        assert x[..., [-2], :].tolist() == x[..., 1:2, :].tolist()
        assert x[..., [-1], :].tolist() == x[..., 2:, :].tolist()


def windows(model_type: str) -> list[object]:
    model = export_model(tiny_config(model_type).to_dict())
    return [arguments(node)[6] for node in model.fx.values() if is_attention(node)]


def test_the_mask_of_a_layer_says_its_window() -> None:
    assert windows("cohere2") == [WINDOW, WINDOW, WINDOW, 0]


def test_attention_in_chunks_is_refused() -> None:
    with pytest.raises(UserError, match="chunks"):
        windows("llama4_text")


def test_weights_have_the_names_that_files_give_them_too() -> None:
    model = export_model(tiny_config("gpt_neox").to_dict())
    assert ("lm_head.weight", "embed_out.weight") in model.parameters.values()


def test_what_layers_compute_of_the_position_is_computed_once() -> None:
    model = export_model(tiny_config("ministral3").to_dict())
    assert len([node for node in model.nodes if node.op == "aten.log.default"]) == 1
