"""Split strategies: pieces of a layer in the graph's order, named by what they are."""

from dataclasses import replace

import pytest

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.graph import GraphNode, NodeKind
from buddy_pipeline.partition.layers import block_role, layer_ranges
from buddy_pipeline.partition.ownership import block_partitions, partition_graph
from buddy_pipeline.partition.strategies import STRATEGIES, layer_splitter
from buddy_pipeline.partition.verifier import verify
from tests.partition.graphs import GraphBuilder, decoder


def names(nodes: list[GraphNode], strategy: str, family: str = "", layer: int = 1) -> list[str]:
    partitions = partition_graph(nodes, layer_splitter(strategy, family))
    return [p.name.removeprefix(f"layer{layer}.") for p in partitions if p.unit == layer]


def layered(*modules: str, layers: int = 2) -> list[GraphNode]:
    """Layers whose modules run in this order: "attn" attends, "" is the layer's own sum, names with
    "norm" are arithmetic, "view" lays out anew, others are linears."""
    g = GraphBuilder()
    ids = g.add("ids", NodeKind.TOKENS)
    table = g.add("table", NodeKind.PARAMETER)
    hidden = g.add("embed", NodeKind.KERNEL, table, ids, op="aten.embedding", module="embed")
    for layer in range(layers):
        path = f"h.{layer}"
        for number, module in enumerate(modules):
            name, inside = f"n{layer}_{number}", f"{path}.{module}" if module else path
            if module == "attn":
                hidden = g.attention(name, hidden, module=inside)
            elif module == "" or "norm" in module:
                hidden = g.compute(name, hidden, module=inside)
            elif module == "view":
                hidden = g.add(name, NodeKind.VIEW, hidden, module=path)
            else:
                hidden = g.linear(name, hidden, inside)
    g.add("output", NodeKind.OUTPUT, g.compute("final", hidden, module="norm"))
    return g.nodes


SEQUENTIAL = ("norm1", "attn", "", "norm2", "mlp", "")
PARALLEL = ("norm1", "attn", "norm2", "mlp", "")
FEED_FORWARD_FIRST = ("norm1", "mlp", "", "attn", "")


def test_coarse_keeps_a_layer_whole() -> None:
    assert names(layered(*SEQUENTIAL), "coarse") == ["layer1"]


@pytest.mark.parametrize("modules", [SEQUENTIAL, PARALLEL])
def test_block_cuts_attention_from_feed_forward(modules: tuple[str, ...]) -> None:
    assert names(layered(*modules), "block") == ["attention", "feed_forward"]


def test_block_puts_the_residual_sum_with_what_it_closes() -> None:
    partitions = partition_graph(layered(*SEQUENTIAL), STRATEGIES["block"])
    attention = next(p for p in partitions if p.name == "layer1.attention")
    assert attention.nodes == ("n1_0", "n1_1", "n1_2")


def test_block_follows_the_order_in_which_a_layer_runs() -> None:
    assert names(layered(*FEED_FORWARD_FIRST), "block") == ["feed_forward", "attention"]


def test_block_leaves_a_layer_of_attention_alone_whole() -> None:
    assert names(layered("norm", "attn", ""), "block") == ["attention"]


def test_fine_has_a_piece_for_each_module_and_each_sum() -> None:
    pieces = ["norm1", "attn", "residual", "norm2", "mlp", "residual2"]
    assert names(layered(*SEQUENTIAL), "fine") == pieces


def test_a_change_of_layout_makes_no_piece_of_its_own() -> None:
    assert names(layered("view", "norm", "attn", "view", "mlp"), "fine") == ["norm", "attn", "mlp"]


def test_a_family_brings_its_own() -> None:
    modules = ("norm1", "attn", "", "norm2", "fc1", "norm_act", "fc2", "")
    general = ["norm1", "attn", "residual", "norm2", "fc1", "norm_act", "fc2", "residual2"]
    assert names(layered(*modules), "fine", "llama") == general
    own = ["norm1", "attn", "residual", "norm2", "feed_forward", "residual2"]
    assert names(layered(*modules), "fine", "opt") == own
    assert names(layered(*modules), "block", "opt") == ["attention", "feed_forward"]


def test_bert_s_sums_and_norms_are_pieces_though_they_lie_two_modules_down() -> None:
    modules = (
        *("attention.self.query", "attn", "attention.output.dense"),
        *("attention.output", "attention.output.LayerNorm"),
        *("intermediate.dense", "intermediate.norm_act", "output.dense"),
        *("output", "output.LayerNorm"),
    )
    nodes = [
        replace(n, module=n.module.replace("attn", "attention.self")) for n in layered(*modules)
    ]
    assert names(nodes, "fine", "llama") == ["attention", "intermediate", "output"]
    assert names(nodes, "block", "bert") == ["attention", "feed_forward"]
    assert names(nodes, "fine", "bert") == ["attention", "norm", "feed_forward", "norm2"]


@pytest.mark.parametrize("family", ["", "coarse", "pieces", "no-such", "../../os", "a.b"])
def test_names_that_are_no_family_have_the_general_strategies(family: str) -> None:
    assert layer_splitter("fine", family) is STRATEGIES["fine"]


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(UserError, match="'finer' does not exist: use one of coarse, block, fine"):
        layer_splitter("finer", "llama")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_strategy_keeps_the_graph(strategy: str, world: int) -> None:
    nodes = decoder(4, residual_to_all=True)
    partitions = partition_graph(nodes, STRATEGIES[strategy])
    ranges = layer_ranges(4, world)
    by_rank = [
        block_partitions(partitions, layers, block_role(rank, world))
        for rank, layers in enumerate(ranges)
    ]
    report = verify(nodes, by_rank)
    assert report.violations == ()
