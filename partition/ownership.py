"""Cutting a model's graph into partitions, and choosing those of one rank.

The layer list is found, not assumed: it is the module list whose entries hold the attention
kernels ("model.layers.N", "transformer.h.N", "gpt_neox.layers.N"), so no model needs code here.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.graph import (
    ATTENTION_OP,
    GraphNode,
    NodeKind,
    Partition,
    Unit,
    node_table,
    position_only,
)
from buddy_pipeline.partition.layers import BlockRole
from buddy_pipeline.partition.strategies import STRATEGIES, Layer, Splitter


def partition_graph(
    nodes: Sequence[GraphNode], split: Splitter = STRATEGIES["coarse"]
) -> list[Partition]:
    """All partitions of a model in pipeline order: positions, prelude, layers 0 to n - 1, postlude.

    `nodes` is the whole graph in execution order, without dead nodes. Values that depend on
    positions alone make up the replicated partition "positions", wherever their module is. Of the
    rest, a node inside a layer's module belongs to that layer. A node outside all layers belongs to
    the prelude before the first layer's nodes, to the postlude after the last layer's, and to the
    layer just left in between. Positions, prelude and postlude are left out where they are empty.
    `split` cuts each layer into its partitions, by default one.

    Raises UserError if the graph has no attention, attends outside one list of layers, runs its
    layers interleaved or out of order, or takes its result from before its end, and ValueError if
    the graph itself is malformed.
    """
    table = node_table(nodes)
    layer_of = _layer_of_nodes(nodes)
    members: dict[Unit, list[str]] = defaultdict(list)
    for name, unit in _assign_units(nodes, layer_of):
        members[unit].append(name)
    order: list[Unit] = ["positions", "prelude", *sorted(set(layer_of.values())), "postlude"]
    path = _layer_list(nodes)
    pieces: list[tuple[Unit, str, tuple[str, ...]]] = []
    for unit in order:
        if isinstance(unit, int):
            layer = Layer(f"{path}.{unit}", tuple(table[n] for n in members[unit]))
            for piece in split(layer):
                name = f"layer{unit}.{piece.name}" if piece.name else f"layer{unit}"
                pieces.append((unit, name, tuple(node.name for node in piece.nodes)))
        elif members[unit]:
            pieces.append((unit, unit, tuple(members[unit])))
    owner = {member: name for _, name, inside in pieces for member in inside}
    _check_result(nodes, owner, pieces[-1][1])

    readers = _readers(nodes, owner)
    return [
        Partition(
            name=name,
            unit=unit,
            nodes=inside,
            inputs=tuple(
                node.name
                for node in nodes
                if name in readers[node.name]
                and owner.get(node.name) != name
                and node.kind not in (NodeKind.PARAMETER, NodeKind.CONSTANT)
            ),
            outputs=tuple(member for member in inside if readers[member] - {name}),
            replicated=unit == "positions",
        )
        for unit, name, inside in pieces
    ]


def layer_count(nodes: Sequence[GraphNode]) -> int:
    """The number of layers in the graph; UserError if it has no single, gapless list of them."""
    return len(set(_layer_of_nodes(nodes).values()))


def block_partitions(
    partitions: Sequence[Partition], layers: range, role: BlockRole
) -> list[Partition]:
    """The partitions that one rank compiles and runs, in pipeline order.

    They are its `layers`, the prelude on the rank that starts the pipeline, the postlude on the one
    that ends it, and the replicated ones whose values those use. A rank with no layers at neither
    end gets none. Raises UserError if `layers` reaches past the model's.
    """
    count = len({p.unit for p in partitions if isinstance(p.unit, int)})
    if layers and not 0 <= layers.start < layers.stop <= count:
        raise UserError(
            f"layers {layers.start} to {layers.stop - 1} are not all in the model:"
            f" choose among its {counted(count, 'layer')}"
        )
    wanted: set[Unit] = set(layers)
    if role in (BlockRole.FIRST, BlockRole.SINGLE):
        wanted.add("prelude")
    if role in (BlockRole.LAST, BlockRole.SINGLE):
        wanted.add("postlude")
    used = {name for p in partitions if p.unit in wanted for name in p.inputs}
    return [
        p for p in partitions if p.unit in wanted or (p.replicated and used.intersection(p.outputs))
    ]


def crossing_values(partitions: Sequence[Partition], boundary: int) -> tuple[str, ...]:
    """The values a message carries from the ranks before layer `boundary` to those from it on.

    They are produced before the boundary and used at or after it, in graph order; replicated values
    are not sent. Normally this is one hidden state; what the prelude makes for all layers crosses
    every boundary. 0 is the cut behind the prelude, the number of layers that before the postlude.
    """
    owned = [partition for partition in partitions if not partition.replicated]
    before = [p for p in owned if _is_before(p.unit, boundary)]
    used = {name for p in owned if not _is_before(p.unit, boundary) for name in p.inputs}
    return tuple(name for p in before for name in p.outputs if name in used)


def _is_before(unit: Unit, boundary: int) -> bool:
    return unit < boundary if isinstance(unit, int) else unit == "prelude"


def _assign_units(
    nodes: Sequence[GraphNode], layer_of: Mapping[str, int]
) -> Iterator[tuple[str, Unit]]:
    """Each owned node's name and unit, in graph order.

    What lies outside the layers goes by its place in the order, not by what it depends on: so a
    norm's `1 + weight`, which depends on nothing, stays with the norm, and cutting the model never
    changes the order in which it runs.
    """
    replicated = position_only(nodes)
    last_in_layers = max(i for i, node in enumerate(nodes) if node.name in layer_of)
    unit: Unit = "prelude"
    for i, node in enumerate(nodes):
        if not node.kind.is_owned:
            continue
        if node.name in replicated:
            yield node.name, "positions"
            continue
        layer = layer_of.get(node.name)
        if layer is not None:
            if isinstance(unit, int) and layer < unit:
                raise UserError(
                    f"node {node.name!r} of module {node.module!r} runs after layer {unit} has"
                    " begun: a model whose layers are interleaved cannot be cut between layers"
                )
            unit = layer
        elif i > last_in_layers:
            unit = "postlude"
        yield node.name, unit


def _layer_of_nodes(nodes: Sequence[GraphNode]) -> dict[str, int]:
    """The layer of each owned, not replicated node inside a layer's module, by node name."""
    layers = _layer_list(nodes)
    replicated = position_only(nodes)
    found = {
        node.name: index
        for node in nodes
        if node.kind.is_owned and node.name not in replicated
        for path, index in _list_entries(node.module)
        if path == layers
    }
    indices = set(found.values())
    for index in range(max(indices)):
        if index not in indices:
            raise UserError(
                f"module {layers}.{index} has no node in the graph, though later layers have:"
                " remove the empty layer from the model"
            )
    return found


def _layer_list(nodes: Sequence[GraphNode]) -> str:
    """The path of the module list whose entries are the layers, such as "model.layers"."""
    attention = [node for node in nodes if node.op == ATTENTION_OP]
    if not attention:
        raise UserError(
            f"the graph of {len(nodes)} nodes has no {ATTENTION_OP} node: only models whose layers"
            " attend through transformers' attention interface can be partitioned"
        )
    indices: dict[str, set[int]] = defaultdict(set)
    candidates = [path for path, _ in _list_entries(attention[0].module)]
    for node in attention:
        entries = dict(_list_entries(node.module))
        candidates = [path for path in candidates if path in entries]
        if not candidates:
            raise UserError(
                f"attention node {node.name!r} in module {node.module!r} is in no module list that"
                " holds the model's other attention: only models with one list of layers can be cut"
            )
        for path, index in entries.items():
            indices[path].add(index)
    # The outermost list, since lists inside a layer (experts, heads) come after it in the path,
    # but not a mere wrapper of one entry around the whole model.
    return next((path for path in candidates if len(indices[path]) > 1), candidates[0])


def _list_entries(module: str) -> list[tuple[str, int]]:
    """The (list path, index) pairs in a module path, outermost first: "a.0.b.2" has two."""
    parts = module.split(".")
    return [(".".join(parts[:i]), int(part)) for i, part in enumerate(parts) if part.isdecimal()]


def _readers(nodes: Sequence[GraphNode], owner: Mapping[str, str]) -> dict[str, set[str | None]]:
    """The partitions whose nodes read each value, by the value's name; None is the output."""
    readers: dict[str, set[str | None]] = defaultdict(set)
    for node in nodes:
        for name in node.inputs:
            readers[name].add(owner.get(node.name))
    return readers


def _check_result(nodes: Sequence[GraphNode], owner: Mapping[str, str], last: str) -> None:
    """The result must come out of the last partition, since only rank 0 hands it on."""
    results = [name for node in nodes if node.kind is NodeKind.OUTPUT for name in node.inputs]
    if not results:
        raise ValueError("the graph has no output")
    for node in nodes:
        if node.name in results and owner.get(node.name) != last:
            raise UserError(
                f"node {node.name!r} of module {node.module!r} is a result of the model, but does"
                " not come from its end: a pipeline only returns what its last part computes"
            )
