"""Binding: what one partition reads and makes, its fragments, and the parameters they need."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from torch.fx import Node

from buddy_pipeline.compile import fx_nodes
from buddy_pipeline.compile.attention_op import ATTENTION_ARGUMENTS
from buddy_pipeline.compile.epilogues import Epilogue, as_epilogue
from buddy_pipeline.compile.export import ExportedModel
from buddy_pipeline.compile.islands import Island, cut_free
from buddy_pipeline.compile.manifest import Parameter
from buddy_pipeline.compile.node_weights import NodeWeights
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.fragments import Fragment, cut, resolve
from buddy_pipeline.partition.graph import GraphNode, NodeKind, Partition

Readers = Callable[[str], Set[str]]
"""The nodes that read a value, through views."""


@dataclass(frozen=True)
class Bound:
    """A partition before it is placed; values, parameters and constants each once."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fragments: tuple[Fragment, ...]
    """In the order in which they run."""
    parameters: tuple[Parameter, ...]
    constants: tuple[str, ...]
    islands: tuple[Island, ...]
    """Those of the fragments that are no kernels, in order."""
    epilogues: Mapping[int, Epilogue]
    """Of fragments that are linears and do the island behind them: their epilogues."""

    @property
    def passed(self) -> tuple[str, ...]:
        """What crosses the partition's borders."""
        return (*self.inputs, *self.outputs)


def bind(
    partition: Partition,
    model: ExportedModel,
    table: Mapping[str, GraphNode],
    weights: NodeWeights,
    readers: Readers,
) -> Bound:
    """Cuts a partition into fragments and finds what they load.

    Raises UserError for what no kernel takes.
    """
    inside = set(partition.nodes)
    inputs = _base_names(partition.inputs, table)
    made = [resolve(n, table) for n in partition.nodes]
    outputs = _base_names((n for n in made if n in inside and readers(n) - inside), table)
    fragments = tuple(_fragments(partition, table, outputs, weights))
    islands = dict(_islands(fragments, table, readers))
    epilogues = dict(_epilogues(fragments, islands, model, table, weights.panel, readers))
    islands |= {number + 1: epilogue.island for number, epilogue in epilogues.items()}
    parameters: list[Parameter] = []
    constants: list[str] = []
    for number, fragment in enumerate(fragments):
        if fragment.is_kernel:
            turns = epilogues[number].turns if number in epilogues else 1
            parameters += _kernel_parameters(fragment, model, table, weights, turns)
            slopes = loaded_per_head(
                model.fx[fragment.nodes[0]], "slopes", NodeKind.CONSTANT, table
            )
            constants += [] if slopes is None else [slopes]
            continue
        for name in islands[number].inputs:
            if table[name].kind is NodeKind.PARAMETER:
                parameters.append(weights.plain(name))
            elif table[name].kind is NodeKind.CONSTANT:
                constants.append(name)
    return Bound(
        inputs,
        outputs,
        fragments,
        tuple(dict.fromkeys(parameters)),
        tuple(dict.fromkeys(constants)),
        tuple(islands.values()),
        epilogues,
    )


def _islands(
    fragments: Sequence[Fragment], table: Mapping[str, GraphNode], readers: Readers
) -> Iterator[tuple[int, Island]]:
    """The islands among the fragments, with their numbers."""
    for number, fragment in enumerate(fragments):
        if not fragment.is_kernel:
            inside = set(fragment.nodes)
            yield number, cut_free(fragment, table, {n for n in inside if readers(n) - inside})


def _epilogues(
    fragments: Sequence[Fragment],
    islands: Mapping[int, Island],
    model: ExportedModel,
    table: Mapping[str, GraphNode],
    panel: int,
    readers: Readers,
) -> Iterator[tuple[int, Epilogue]]:
    """The linears, by number, that can do the island right behind them, which alone reads them."""
    for number, fragment in enumerate(fragments):
        island = islands.get(number + 1)
        if island is None or not all(
            fx_nodes.linear_weight(model.fx[n], model.parameters) and readers(n) <= {*island.nodes}
            for n in fragment.nodes
        ):
            continue
        epilogue = as_epilogue(island, fragment.nodes, panel, model, table)
        if epilogue is not None:
            yield number, epilogue


def loaded_per_head(
    node: Node, argument: str, kind: NodeKind, table: Mapping[str, GraphNode]
) -> str | None:
    """What an attention reads for each of its heads, by name; None where it reads nothing.

    Raises UserError for values that are computed for each token.
    """
    if not fx_nodes.is_attention(node):
        return None
    given = fx_nodes.arguments(node)[ATTENTION_ARGUMENTS.index(argument)]
    if given is None:
        return None
    name = resolve(given.name, table)
    if table[name].kind is not kind:
        raise UserError(
            f"node {node.name} of module '{table[node.name].module}' attends with "
            f"{argument} that are computed for each token, which has no kernel yet"
        )
    return name


def _base_names(names: Iterable[str], table: Mapping[str, GraphNode]) -> tuple[str, ...]:
    """The values behind views; what is loaded, not computed, needs no passing."""
    bases = dict.fromkeys(resolve(n, table) for n in names)
    loaded = (NodeKind.PARAMETER, NodeKind.CONSTANT)
    return tuple(n for n in bases if table[n].kind not in loaded)


def _fragments(
    partition: Partition,
    table: Mapping[str, GraphNode],
    outputs: tuple[str, ...],
    weights: NodeWeights,
) -> Iterator[Fragment]:
    """The fragments, with linears apart that cannot be one kernel: those whose result leaves the
    partition write to the output directly, the others side by side where their weights are of one
    format."""
    for fragment in cut(partition, table):
        if not fragment.is_kernel or len(fragment.nodes) == 1:
            yield fragment
            continue
        together: dict[str, list[str]] = {}
        for name in fragment.nodes:
            if name in outputs:
                yield Fragment(True, (name,))
            else:
                together.setdefault(weights.linear_form(name), []).append(name)
        for names in together.values():
            yield Fragment(True, tuple(names))


def _kernel_parameters(
    fragment: Fragment,
    model: ExportedModel,
    table: Mapping[str, GraphNode],
    weights: NodeWeights,
    turns: int,
) -> list[Parameter]:
    node = model.fx[fragment.nodes[0]]
    if fx_nodes.is_attention(node):
        sinks = loaded_per_head(node, "sinks", NodeKind.PARAMETER, table)
        return [] if sinks is None else [weights.plain(sinks)]
    if fx_nodes.is_embedding(node, model.parameters):
        return [weights.table(node)]
    if fx_nodes.is_top_k(node):
        return []
    if fx_nodes.is_expert_linear(node):
        weight, bias = weights.experts(node)
    else:
        weight, bias = weights.linears(fragment.nodes, turns)
    return [weight] if bias is None else [weight, bias]
