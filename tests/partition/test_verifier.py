"""A right cut passes; every kind of wrong cut is reported as what it is."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buddy_pipeline.partition.graph import GraphNode, Partition
from buddy_pipeline.partition.layers import block_role, layer_ranges
from buddy_pipeline.partition.ownership import block_partitions, layer_count, partition_graph
from buddy_pipeline.partition.verifier import Fault, Report, verify
from tests.partition.graphs import decoder, random_decoders, with_inputs

Cut = list[list[Partition]]


def cut(nodes: list[GraphNode], world: int) -> Cut:
    """The partitions of every rank, index = rank, as the compiler makes them."""
    partitions = partition_graph(nodes)
    return [
        block_partitions(partitions, layers, block_role(rank, world))
        for rank, layers in enumerate(layer_ranges(layer_count(nodes), world))
    ]


def change(ranks: Cut, rank: int, name: str, edit: Callable[[Partition], Partition]) -> Cut:
    """The same cut with one partition of one rank edited."""
    return [
        [edit(p) if (r, p.name) == (rank, name) else p for p in partitions]
        for r, partitions in enumerate(ranks)
    ]


def faults(report: Report) -> set[tuple[Fault, str, int | None]]:
    return {(v.fault, v.node, v.rank) for v in report.violations}


@pytest.fixture
def nodes() -> list[GraphNode]:
    return decoder(4)


@pytest.fixture
def ranks(nodes: list[GraphNode]) -> Cut:
    """Rank 1 owns the prelude and layers 0 and 1, rank 0 layers 2 and 3 and the postlude."""
    return cut(nodes, 2)


def test_right_cut_passes_with_its_counts(nodes: list[GraphNode], ranks: Cut) -> None:
    report = verify(nodes, ranks)
    assert report.ok
    assert (report.world, report.graph_nodes, report.compute_nodes) == (2, 56, 38)
    assert (report.replicated_nodes, report.partitions) == (6, 8)
    assert report.crossing_values == {"1->0": ("hidden1",)}
    assert (report.missing, report.duplicate, report.order_ok) == ((), (), True)


def test_report_is_json(nodes: list[GraphNode], ranks: Cut) -> None:
    broken = change(ranks, 0, "layer3", lambda p: replace(p, nodes=p.nodes[:-1]))
    read = json.loads(verify(nodes, broken).to_json())
    assert read["ok"] is False
    assert read["missing"] == ["hidden3"]
    assert read["order_ok"] is True
    first = read["violations"][0]
    assert (first["fault"], first["node"], first["rank"]) == ("missing", "hidden3", None)
    assert "model.layers.3" in first["message"]


def test_missing_node(nodes: list[GraphNode], ranks: Cut) -> None:
    broken = change(
        ranks, 1, "layer1", lambda p: replace(p, nodes=tuple(n for n in p.nodes if n != "normed1"))
    )
    report = verify(nodes, broken)
    assert report.missing == ("normed1",)
    assert (Fault.MISSING, "normed1", None) in faults(report)


def test_missing_rank_loses_all_its_nodes(nodes: list[GraphNode], ranks: Cut) -> None:
    report = verify(nodes, [ranks[0], []])
    lost = {name for p in ranks[1] if not p.replicated for name in p.nodes}
    assert set(report.missing) == lost


def test_node_on_two_ranks(nodes: list[GraphNode], ranks: Cut) -> None:
    broken = change(ranks, 0, "layer2", lambda p: replace(p, nodes=("hidden1", *p.nodes)))
    report = verify(nodes, broken)
    assert report.duplicate == ("hidden1",)
    assert (Fault.DUPLICATE, "hidden1", 0) in faults(report)


def test_node_twice_in_one_partition(nodes: list[GraphNode], ranks: Cut) -> None:
    broken = change(ranks, 0, "postlude", lambda p: replace(p, nodes=(*p.nodes, "logits")))
    report = verify(nodes, broken)
    assert report.duplicate == ("logits",)
    assert report.order_ok


def test_replicated_without_mark(nodes: list[GraphNode], ranks: Cut) -> None:
    for rank in (0, 1):
        ranks = change(ranks, rank, "positions", lambda p: replace(p, replicated=False))
    report = verify(nodes, ranks)
    assert set(report.duplicate) == set(ranks[0][0].nodes)
    assert (Fault.DUPLICATE, "cos", 0) in faults(report)


def test_marked_replicated_though_it_depends_on_tokens(nodes: list[GraphNode], ranks: Cut) -> None:
    broken = change(ranks, 1, "prelude", lambda p: replace(p, replicated=True))
    assert (Fault.REPLICATED, "embed", 1) in faults(verify(nodes, broken))


def test_replicated_values_absent_from_a_rank_that_uses_them(
    nodes: list[GraphNode], ranks: Cut
) -> None:
    report = verify(nodes, [[p for p in ranks[0] if not p.replicated], ranks[1]])
    assert faults(report) == {
        (Fault.NOT_REPLICATED, "rotated2", 0),
        (Fault.NOT_REPLICATED, "rotated3", 0),
    }


def test_replicated_values_may_be_absent_where_unused(nodes: list[GraphNode]) -> None:
    ranks = cut(nodes, 6)
    assert [p.name for p in ranks[0]] == ["postlude"]
    assert ranks[1] == []
    assert verify(nodes, ranks).ok


def test_replicated_twice_on_one_rank(nodes: list[GraphNode], ranks: Cut) -> None:
    report = verify(nodes, [[ranks[0][0], *ranks[0]], ranks[1]])
    assert set(report.duplicate) == set(ranks[0][0].nodes)


def test_two_nodes_swapped_in_a_partition(nodes: list[GraphNode], ranks: Cut) -> None:
    def swap(p: Partition) -> Partition:
        i = p.nodes.index("expert2_0")
        return replace(p, nodes=(*p.nodes[:i], "expert2_1", "expert2_0", *p.nodes[i + 2 :]))

    report = verify(nodes, change(ranks, 0, "layer2", swap))
    assert not report.order_ok
    assert faults(report) == {(Fault.ORDER, "expert2_0", 0)}


def test_replicated_nodes_swapped(nodes: list[GraphNode], ranks: Cut) -> None:
    broken = change(
        ranks, 0, "positions", lambda p: replace(p, nodes=("cos", "angle", *p.nodes[2:]))
    )
    assert faults(verify(nodes, broken)) == {
        (Fault.ORDER, "angle", 0),
        (Fault.PRODUCER, "cos", 0),
    }


def test_partitions_swapped_on_a_rank(nodes: list[GraphNode], ranks: Cut) -> None:
    positions, layer2, layer3, postlude = ranks[0]
    report = verify(nodes, [[positions, layer3, layer2, postlude], ranks[1]])
    assert not report.order_ok
    assert (Fault.PRODUCER, "normed3", 0) in faults(report)


def test_ranks_swapped(nodes: list[GraphNode], ranks: Cut) -> None:
    """Rank 0 with the first layers would have activations travel the wrong way."""
    report = verify(nodes, ranks[::-1])
    assert not report.order_ok
    assert (Fault.PRODUCER, "normed2", 1) in faults(report)


def test_positions_behind_the_layers_that_use_them(nodes: list[GraphNode], ranks: Cut) -> None:
    report = verify(nodes, [ranks[0], [*ranks[1][1:], ranks[1][0]]])
    assert faults(report) == {
        (Fault.PRODUCER, "rotated0", 1),
        (Fault.PRODUCER, "rotated1", 1),
    }


def test_undeclared_input(nodes: list[GraphNode], ranks: Cut) -> None:
    broken = change(ranks, 0, "layer2", lambda p: replace(p, inputs=("turn2",)))
    assert faults(verify(nodes, broken)) == {(Fault.UNDECLARED_INPUT, "hidden1", 0)}


def test_undeclared_token_ids(nodes: list[GraphNode], ranks: Cut) -> None:
    broken = change(ranks, 1, "prelude", lambda p: replace(p, inputs=()))
    assert faults(verify(nodes, broken)) == {(Fault.UNDECLARED_INPUT, "ids", 1)}


def test_undeclared_output(nodes: list[GraphNode], ranks: Cut) -> None:
    broken = change(ranks, 1, "layer1", lambda p: replace(p, outputs=()))
    assert faults(verify(nodes, broken)) == {(Fault.UNDECLARED_OUTPUT, "hidden1", 1)}


def test_undeclared_result(nodes: list[GraphNode], ranks: Cut) -> None:
    broken = change(ranks, 0, "postlude", lambda p: replace(p, outputs=()))
    assert faults(verify(nodes, broken)) == {(Fault.UNDECLARED_OUTPUT, "logits", 0)}


@pytest.mark.parametrize("value", ["embed", "norm_weight", "frequencies", "query3", "nowhere"])
def test_needless_input(nodes: list[GraphNode], ranks: Cut, value: str) -> None:
    """Unused values, parameters and constants (which are loaded, not sent), values made inside."""
    broken = change(ranks, 0, "layer3", lambda p: replace(p, inputs=(*p.inputs, value)))
    assert faults(verify(nodes, broken)) == {(Fault.NEEDLESS_INPUT, value, 0)}


@pytest.mark.parametrize("value", ["query1", "hidden0", "nowhere"])
def test_needless_output(nodes: list[GraphNode], ranks: Cut, value: str) -> None:
    broken = change(ranks, 1, "layer1", lambda p: replace(p, outputs=(*p.outputs, value)))
    assert faults(verify(nodes, broken)) == {(Fault.NEEDLESS_OUTPUT, value, 1)}


@pytest.mark.parametrize("name", ["invented", "table", "frequencies", "ids", "output"])
def test_name_that_is_no_compute_node(nodes: list[GraphNode], ranks: Cut, name: str) -> None:
    broken = change(ranks, 0, "layer2", lambda p: replace(p, nodes=(*p.nodes, name)))
    assert (Fault.UNKNOWN, name, 0) in faults(verify(nodes, broken))


def test_cut_of_another_graph(nodes: list[GraphNode], ranks: Cut) -> None:
    """A layer that reads past its neighbour, which the cut at hand does not know about."""
    rewired = with_inputs(nodes, "final", "hidden2", "gain")
    assert {f for f, _, _ in faults(verify(rewired, ranks))} >= {
        Fault.UNDECLARED_INPUT,
        Fault.NEEDLESS_OUTPUT,
    }


def test_graph_in_which_a_consumer_precedes_its_producer(
    nodes: list[GraphNode], ranks: Cut
) -> None:
    """The graph's own order is no excuse."""
    circular = with_inputs(nodes, "normed0", "hidden0")
    assert (Fault.PRODUCER, "normed0", 1) in faults(verify(circular, ranks))


@given(random_decoders(), st.integers(1, 9))
def test_every_cut_of_every_layered_graph_passes(nodes: list[GraphNode], world: int) -> None:
    report = verify(nodes, cut(nodes, world))
    assert report.ok, report.to_json()


@given(random_decoders(), st.integers(1, 4), st.data())
def test_any_node_taken_away_repeated_or_moved_is_reported(
    nodes: list[GraphNode], world: int, data: st.DataObject
) -> None:
    ranks = cut(nodes, world)
    rank = data.draw(st.sampled_from([r for r in range(world) if ranks[r]]))
    part = data.draw(st.sampled_from(ranks[rank]))
    name = data.draw(st.sampled_from(part.nodes))
    without = tuple(n for n in part.nodes if n != name)

    def edited(*new: str) -> Report:
        return verify(nodes, change(ranks, rank, part.name, lambda p: replace(p, nodes=new)))

    assert not edited(*without).ok
    assert name in edited(*part.nodes, name).duplicate
    at = data.draw(st.integers(0, len(without)))
    moved = (*without[:at], name, *without[at:])
    assert edited(*moved).order_ok == (moved == part.nodes)


@given(random_decoders(), st.integers(1, 4), st.data())
def test_any_declaration_taken_away_is_reported(
    nodes: list[GraphNode], world: int, data: st.DataObject
) -> None:
    ranks = cut(nodes, world)
    rank = data.draw(st.sampled_from([r for r in range(world) if ranks[r]]))
    part = data.draw(st.sampled_from(ranks[rank]))
    field = data.draw(st.sampled_from([f for f in ("inputs", "outputs") if getattr(part, f)]))
    name = data.draw(st.sampled_from(getattr(part, field)))
    kept = tuple(n for n in getattr(part, field) if n != name)
    broken = change(ranks, rank, part.name, lambda p: replace(p, **{field: kept}))
    fault = Fault.UNDECLARED_INPUT if field == "inputs" else Fault.UNDECLARED_OUTPUT
    assert faults(verify(nodes, broken)) == {(fault, name, rank)}
