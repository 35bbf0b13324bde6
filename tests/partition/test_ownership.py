"""Which partition owns which node, and which partitions a rank gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.graph import GraphNode, NodeKind, Partition
from buddy_pipeline.partition.layers import BlockRole, block_role, layer_ranges
from buddy_pipeline.partition.ownership import (
    block_partitions,
    crossing_values,
    layer_count,
    partition_graph,
)
from tests.partition.graphs import GraphBuilder, decoder, random_decoders


def by_name(nodes: list[GraphNode]) -> dict[str, Partition]:
    return {partition.name: partition for partition in partition_graph(nodes)}


def test_partitions_come_in_pipeline_order() -> None:
    partitions = partition_graph(decoder(3))
    assert [p.unit for p in partitions] == ["positions", "prelude", 0, 1, 2, "postlude"]
    assert [p.replicated for p in partitions] == [True] + [False] * 5


def test_embedding_is_the_prelude_and_reads_the_token_ids() -> None:
    prelude = by_name(decoder(2))["prelude"]
    assert (prelude.nodes, prelude.inputs, prelude.outputs) == (("embed",), ("ids",), ("embed",))


def test_layer_owns_its_modules_and_takes_hidden_state_and_rotary_values() -> None:
    layer = by_name(decoder(2))["layer1"]
    assert layer.nodes == (
        "normed1", "query1", "rotated1", "attend1", "expert1_0", "expert1_1", "hidden1",
    )  # fmt: skip
    assert layer.inputs == ("hidden0", "turn1")
    assert layer.outputs == ("hidden1",)


def test_final_norm_and_head_are_the_postlude() -> None:
    """Also the norm's `1 + weight`, which depends on no layer, and the logits as its output."""
    postlude = by_name(decoder(2))["postlude"]
    assert postlude.nodes == ("gain", "final", "logits")
    assert (postlude.inputs, postlude.outputs) == (("hidden1",), ("logits",))


def test_position_only_values_are_replicated_even_inside_a_layer() -> None:
    positions = by_name(decoder(2))["positions"]
    assert positions.nodes == ("angle", "cos", "turn0", "turn1")
    assert (positions.inputs, positions.outputs) == (("positions",), ("turn0", "turn1"))


def test_learned_positions_are_not_replicated() -> None:
    """GPT-2's position embedding reads a parameter, so only the first rank shall load it."""
    g = GraphBuilder()
    ids, positions = g.add("ids", NodeKind.TOKENS), g.add("positions", NodeKind.POSITIONS)
    table = g.add("table", NodeKind.PARAMETER)
    place = g.add("place", NodeKind.KERNEL, table, positions, module="transformer.wpe")
    token = g.add("token", NodeKind.KERNEL, table, ids, module="transformer.wte")
    hidden = g.compute("sum", token, place, module="transformer")
    attend = g.attention("attend", hidden, module="transformer.h.0.attn")
    g.add("output", NodeKind.OUTPUT, attend)
    partitions = by_name(g.nodes)
    assert list(partitions) == ["prelude", "layer0"]
    assert partitions["prelude"].nodes == ("place", "token", "sum")
    assert partitions["prelude"].inputs == ("ids", "positions")


def test_node_between_two_layers_belongs_to_the_one_just_left() -> None:
    g = GraphBuilder()
    first = g.attention("first", g.add("ids", NodeKind.TOKENS), module="layers.0.attn")
    between = g.compute("between", first, module="model")
    g.add("output", NodeKind.OUTPUT, g.attention("second", between, module="layers.1.attn"))
    assert by_name(g.nodes)["layer0"].nodes == ("first", "between")


@pytest.mark.parametrize(
    "path", ["model.layers", "transformer.h", "gpt_neox.layers", "layers", "m.0.decoder.blocks"]
)
def test_layer_list_is_found_whatever_its_path(path: str) -> None:
    assert layer_count(decoder(5, path)) == 5


def test_single_layer_is_found() -> None:
    assert [p.name for p in partition_graph(decoder(1))] == [
        "positions", "prelude", "layer0", "postlude",
    ]  # fmt: skip


def test_attention_in_a_list_inside_each_layer_does_not_hide_the_layers() -> None:
    g = GraphBuilder()
    value = g.add("ids", NodeKind.TOKENS)
    for layer in range(3):
        for head in range(4):
            at = f"layers.{layer}.heads.{head}"
            value = g.attention(f"attend{layer}_{head}", value, module=at)
    g.add("output", NodeKind.OUTPUT, value)
    assert layer_count(g.nodes) == 3


def test_tied_embedding_is_owned_by_no_partition() -> None:
    """Both ends read the table; it crosses no boundary, since each loads it."""
    partitions = partition_graph(decoder(2))
    assert all("table" not in (*p.nodes, *p.inputs, *p.outputs) for p in partitions)


def test_one_hidden_state_crosses_each_boundary() -> None:
    partitions = partition_graph(decoder(3))
    assert [crossing_values(partitions, b) for b in range(4)] == [
        ("embed",), ("hidden0",), ("hidden1",), ("hidden2",),
    ]  # fmt: skip


def test_prelude_value_used_by_all_layers_crosses_every_boundary_before_the_last() -> None:
    partitions = partition_graph(decoder(3, residual_to_all=True))
    assert [crossing_values(partitions, b) for b in range(4)] == [
        ("embed",), ("embed", "hidden0"), ("embed", "hidden1"), ("hidden2",),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "role", "names"),
    [
        (range(0, 3), BlockRole.SINGLE, "positions prelude layer0 layer1 layer2 postlude"),
        (range(0, 1), BlockRole.FIRST, "positions prelude layer0"),
        (range(1, 2), BlockRole.MIDDLE, "positions layer1"),
        (range(2, 3), BlockRole.LAST, "positions layer2 postlude"),
        (range(2, 2), BlockRole.MIDDLE, ""),
        (range(0, 0), BlockRole.FIRST, "prelude"),
        (range(3, 3), BlockRole.LAST, "postlude"),
    ],
)
def test_rank_gets_its_layers_its_end_and_the_positions_it_uses(
    layers: range, role: BlockRole, names: str
) -> None:
    block = block_partitions(partition_graph(decoder(3)), layers, role)
    assert [p.name for p in block] == names.split()


def test_layers_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(UserError, match="layers 2 to 3 are not all in the model"):
        block_partitions(partition_graph(decoder(3)), range(2, 4), BlockRole.LAST)


def test_graph_without_attention_is_refused() -> None:
    g = GraphBuilder()
    g.add("output", NodeKind.OUTPUT, g.compute("only", g.add("ids", NodeKind.TOKENS)))
    with pytest.raises(UserError, match=r"no bp\.attention\.default node"):
        partition_graph(g.nodes)


def test_attention_in_two_lists_is_refused() -> None:
    g = GraphBuilder()
    left = g.attention("left", g.add("ids", NodeKind.TOKENS), module="encoder.layers.0.attn")
    right = g.attention("right", left, module="decoder.layers.0.attn")
    g.add("output", NodeKind.OUTPUT, right)
    with pytest.raises(UserError, match=r"'right' in module 'decoder\.layers\.0\.attn'"):
        partition_graph(g.nodes)


def test_attention_outside_any_list_is_refused() -> None:
    g = GraphBuilder()
    attend = g.attention("attend", g.add("ids", NodeKind.TOKENS), module="model.attn")
    g.add("output", NodeKind.OUTPUT, attend)
    with pytest.raises(UserError, match=r"'attend' in module 'model\.attn'"):
        layer_count(g.nodes)


def test_interleaved_layers_are_refused() -> None:
    g = GraphBuilder()
    value = g.add("ids", NodeKind.TOKENS)
    for i, layer in enumerate([0, 1, 0]):
        value = g.attention(f"attend{i}", value, module=f"layers.{layer}.attn")
    g.add("output", NodeKind.OUTPUT, value)
    with pytest.raises(UserError, match=r"'attend2' of module 'layers\.0\.attn'"):
        partition_graph(g.nodes)


def test_layer_without_nodes_is_refused() -> None:
    g = GraphBuilder()
    value = g.add("ids", NodeKind.TOKENS)
    for layer in (0, 2):
        value = g.attention(f"attend{layer}", value, module=f"layers.{layer}.attn")
    g.add("output", NodeKind.OUTPUT, value)
    with pytest.raises(UserError, match=r"layers\.1 has no node"):
        partition_graph(g.nodes)


def test_result_from_the_middle_is_refused() -> None:
    nodes = decoder(2)
    nodes[-1] = GraphNode("output", "", ("logits", "hidden0"), "", NodeKind.OUTPUT)
    with pytest.raises(UserError, match="'hidden0' of module"):
        partition_graph(nodes)


def test_malformed_graph_is_a_programming_error() -> None:
    nodes = decoder(1)
    with pytest.raises(ValueError, match="exists twice"):
        partition_graph([*nodes, nodes[0]])
    with pytest.raises(ValueError, match="does not exist"):
        partition_graph(nodes[1:])
    with pytest.raises(ValueError, match="no output"):
        partition_graph(nodes[:-1])


@given(random_decoders(), st.integers(1, 8))
def test_every_rank_gets_what_arrives_and_what_it_replicates(
    nodes: list[GraphNode], world: int
) -> None:
    """A rank's inputs are made on it, or cross the boundary above it, or are ids and positions."""
    partitions = partition_graph(nodes)
    for rank, layers in enumerate(layer_ranges(layer_count(nodes), world)):
        role = block_role(rank, world)
        block = block_partitions(partitions, layers, role)
        known = {"ids", "positions"}
        if role in (BlockRole.MIDDLE, BlockRole.LAST):
            known.update(crossing_values(partitions, layers.start))
        for partition in block:
            assert known.issuperset(partition.inputs)
            known.update(partition.outputs)
