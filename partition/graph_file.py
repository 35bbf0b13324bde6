"""A graph as a file: the verifier reads it beside a plan, so nothing is exported again."""

import json
from collections.abc import Sequence

from buddy_pipeline.partition.graph import GraphNode, NodeKind
from buddy_pipeline.partition.sealed_json import seal, unseal

#: Raised whenever the meaning of a row's entry changes.
FORMAT_VERSION = 1


def graph_to_json(nodes: Sequence[GraphNode]) -> str:
    """The nodes as sealed JSON text, one a line, in order."""
    rows = [[node.name, node.op, list(node.inputs), node.module, node.kind.value] for node in nodes]
    head = json.dumps({**seal(FORMAT_VERSION, {"nodes": rows}), "nodes": []})
    lines = ",\n".join(json.dumps(row) for row in rows)
    return head.removesuffix("]}") + f"\n{lines}\n]}}\n"


def graph_from_json(text: str | bytes) -> list[GraphNode]:
    """The nodes of `graph_to_json`'s text; ValueError, saying why, for any other."""
    rows = unseal(FORMAT_VERSION, text)["nodes"]
    return [
        GraphNode(name, op, tuple(inputs), module, NodeKind(kind))
        for name, op, inputs, module, kind in rows
    ]
