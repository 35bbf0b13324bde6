"""Exporting every family: what is in the graph, what is not, and models that do not fit."""

from collections import Counter
from typing import Any

import pytest

from buddy_pipeline.compile.export import export_model
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.graph import NodeKind, node_table
from buddy_pipeline.partition.ownership import ATTENTION_OP, layer_count
from tests.checkpoints import FAMILIES, MIXTURES, tiny_config
from tests.compile.models import model

#: Linears of one layer.
LINEARS = {"gpt2": 4, "qwen2": 7, "llama": 7, "qwen3": 7, "mistral": 7, "gemma2": 7}


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_a_graph(family: str) -> None:
    nodes = model(family).exported.nodes
    kernels = Counter(n.op for n in nodes if n.kind is NodeKind.KERNEL)
    attention = kernels.pop(ATTENTION_OP)
    embeddings = kernels.pop("aten.embedding.default")
    assert attention == layer_count(nodes) == 3
    assert embeddings == (2 if family == "gpt2" else 1)  # GPT-2 learns its positions
    assert sum(kernels.values()) == 3 * LINEARS[family] + 1  # the head


@pytest.mark.parametrize("family", MIXTURES)
def test_kernels_of_a_mixture_of_experts(family: str) -> None:
    """The choice, the experts' two matrices; the router is a linear like the others."""
    kernels = Counter(n.op for n in model(family).exported.nodes if n.kind is NodeKind.KERNEL)
    assert kernels["bp.top_k.default"] == 3
    assert kernels["bp.expert_linear.default"] == 6
    assert kernels["aten.linear.default"] == 3 * 5 + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_is_whole_in_order_and_without_dead_nodes(family: str) -> None:
    exported = model(family).exported
    node_table(exported.nodes)
    seen: set[str] = set()
    for node in exported.nodes:
        assert set(node.inputs) <= seen
        seen.add(node.name)
    used = {name for node in exported.nodes for name in node.inputs}
    assert seen - used == {n.name for n in exported.nodes if n.kind is NodeKind.OUTPUT}
    kinds = Counter(node.kind for node in exported.nodes)
    assert kinds[NodeKind.TOKENS] == kinds[NodeKind.POSITIONS] == kinds[NodeKind.OUTPUT] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_views_have_one_input_and_as_many_elements(family: str) -> None:
    exported = model(family).exported
    views = [n for n in exported.nodes if n.kind is NodeKind.VIEW]
    assert views
    for node in views:
        value = exported.fx[node.name].meta["val"]
        (source,) = node.inputs
        assert value.numel() == exported.fx[source].meta["val"].numel()


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_have_the_names_and_shapes_of_a_checkpoint(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = tiny_config(family)
    kind = config.pop("model_type")
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    expected = {name: tuple(p.shape) for name, p in whole.state_dict(keep_vars=True).items()}
    names = {n for aliases in model(family).exported.parameters.values() for n in aliases}
    assert names == set(expected)
    for name, shape in model(family).exported.shapes.items():
        assert expected[name] == shape


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gpt2"])
def test_a_tied_head_is_an_alias_of_the_embedding(family: str) -> None:
    aliases = [a for a in model(family).exported.parameters.values() if "lm_head.weight" in a]
    # The graph may read it as two placeholders; both have both names.
    assert len(set(aliases)) == 1 and len(aliases[0]) == 2


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_head_of_its_own_is_no_alias(family: str) -> None:
    assert ("lm_head.weight",) in model(family).exported.parameters.values()


def test_rotary_frequencies_are_constants_with_values() -> None:
    constants = model("llama").exported.constants
    assert constants and all(c.size and abs(c).max() > 0 for c in constants.values())


def test_layers_of_gpt2_have_one_structure() -> None:
    """Dropouts that are off have gone, also the one behind the embeddings."""
    assert not [n for n in model("gpt2").exported.nodes if "dropout" in n.op]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "model_type"),
        ({"model_type": "never_heard_of"}, "never_heard_of"),
        ({"model_type": "vit"}, "vit"),
        (
            {"model_type": "llama", "num_hidden_layers": 1, "architectures": 3},
            "architectures 3; it must be a list",
        ),
        ({"model_type": "mamba", "num_hidden_layers": 1, "hidden_size": 8}, "convolution"),
    ],
)
def test_models_that_do_not_fit_are_one_line(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as error:
        exported = export_model(config)
        layer_count(exported.nodes)
    assert "\n" not in str(error.value)


def test_a_graph_without_our_attention_is_refused() -> None:
    nodes = [n for n in model("llama").exported.nodes if n.op != ATTENTION_OP]
    with pytest.raises(UserError, match=r"no bp\.attention"):
        layer_count(nodes)


def test_an_encoder_is_refused_as_not_causal() -> None:
    config = tiny_config("llama")
    with pytest.raises(UserError):
        export_model({**config, "model_type": "bert"})
