"""Fragments: kernels first, islands as large as can be, every node once and after what it reads."""

from itertools import pairwise

import pytest
from hypothesis import given

from buddy_pipeline.partition.fragments import Fragment, cut, resolve
from buddy_pipeline.partition.graph import GraphNode, NodeKind, Partition, node_table
from buddy_pipeline.partition.ownership import partition_graph
from tests.partition.graphs import GraphBuilder, decoder, random_decoders


def whole(nodes: list[GraphNode], *inputs: str) -> list[Fragment]:
    """The fragments of all owned nodes as one partition."""
    owned = tuple(n.name for n in nodes if n.kind.is_owned)
    return cut(Partition("all", 0, owned, inputs, (), False), node_table(nodes))


def test_silu_of_gate_times_up_is_one_island_behind_both_projections() -> None:
    g = GraphBuilder()
    g.add("x", NodeKind.TOKENS)
    gate = g.linear("gate", "x", "mlp.gate")
    bent = g.compute("silu", gate)
    up = g.linear("up", "x", "mlp.up")
    product = g.compute("product", bent, up)
    g.linear("down", product, "mlp.down")
    assert whole(g.nodes, "x") == [
        Fragment(True, ("gate", "up")),
        Fragment(False, ("silu", "product")),
        Fragment(True, ("down",)),
    ]


def test_linears_that_read_the_same_row_through_views_are_one_fragment() -> None:
    g = GraphBuilder()
    x = g.add("x", NodeKind.TOKENS)
    flat = g.add("flat", NodeKind.VIEW, x)
    g.linear("query", x, "q")
    g.linear("key", flat, "k")
    bias = g.add("bias", NodeKind.PARAMETER)
    weight = g.add("weight", NodeKind.PARAMETER)
    g.add("value", NodeKind.KERNEL, bias, flat, weight, op="aten.addmm.default")
    other = g.compute("other", x)
    g.linear("apart", other, "o")
    assert whole(g.nodes, "x") == [
        Fragment(True, ("query", "key", "value")),
        Fragment(False, ("other",)),
        Fragment(True, ("apart",)),
    ]


def test_attention_and_embeddings_stay_alone() -> None:
    g = GraphBuilder()
    x = g.add("x", NodeKind.TOKENS)
    table = g.add("table", NodeKind.PARAMETER)
    for name in ("first", "second"):
        g.add(name, NodeKind.KERNEL, table, x, op="aten.embedding.default")
    g.attention("attend", "first", "first", "second", module="m")
    assert [f.nodes for f in whole(g.nodes, "x")] == [("first",), ("second",), ("attend",)]


def test_a_view_leads_to_what_it_looks_at() -> None:
    g = GraphBuilder()
    g.add("x", NodeKind.TOKENS)
    g.add("once", NodeKind.VIEW, "x")
    g.add("twice", NodeKind.VIEW, "once")
    assert resolve("twice", node_table(g.nodes)) == "x" == resolve("x", node_table(g.nodes))


def test_nodes_that_wait_for_each_other_are_an_error() -> None:
    nodes = [
        GraphNode("a", "aten.add", ("b",), "", NodeKind.COMPUTE),
        GraphNode("b", "aten.add", ("a",), "", NodeKind.COMPUTE),
    ]
    with pytest.raises(ValueError, match="waits for itself at a"):
        cut(Partition("loop", 0, ("a", "b"), (), (), False), {n.name: n for n in nodes})


def check(nodes: list[GraphNode]) -> None:
    table = node_table(nodes)
    for partition in partition_graph(nodes):
        fragments = cut(partition, table)
        placed = [name for f in fragments for name in f.nodes]
        expected = [n for n in partition.nodes if table[n].kind is not NodeKind.VIEW]
        assert sorted(placed) == sorted(expected)
        done: set[str] = set()
        for fragment in fragments:
            order = [expected.index(n) for n in fragment.nodes]
            assert order == sorted(order)
            for name in fragment.nodes:
                kind = NodeKind.KERNEL if fragment.is_kernel else NodeKind.COMPUTE
                assert table[name].kind is kind
                for source in (resolve(i, table) for i in table[name].inputs):
                    ready = done if fragment.is_kernel else done | set(fragment.nodes)
                    assert source in ready or source not in partition.nodes
            done |= set(fragment.nodes)
        assert not any(not a.is_kernel and not b.is_kernel for a, b in pairwise(fragments))


def test_a_decoder() -> None:
    check(decoder(3))
    check(decoder(2, residual_to_all=True))


@given(random_decoders())
def test_any_graph(nodes: list[GraphNode]) -> None:
    check(nodes)
