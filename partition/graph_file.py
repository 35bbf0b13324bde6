"""A graph as a file: the verifier reads it beside a plan, so nothing is exported again."""

import json
from collections.abc import Sequence

from buddy_pipeline.partition.graph import GraphNode, NodeKind


def graph_to_json(nodes: Sequence[GraphNode]) -> str:
    """The nodes as JSON text, one a line, in order."""
    rows = [
        json.dumps([node.name, node.op, list(node.inputs), node.module, node.kind.value])
        for node in nodes
    ]
    return "[\n" + ",\n".join(rows) + "\n]\n"


def graph_from_json(text: str) -> list[GraphNode]:
    """The nodes of `graph_to_json`'s text; ValueError if it is malformed."""
    try:
        return [
            GraphNode(name, op, tuple(inputs), module, NodeKind(kind))
            for name, op, inputs, module, kind in json.loads(text)
        ]
    except TypeError as error:
        raise ValueError(f"the graph is malformed: {error}") from error
