"""The proof that partitions of a graph, dealt out to ranks, are the graph: nothing lost or moved.

It looks only at the graph and at what each rank was given, not at how the cut was made, so a fault
in the cutting, or in the choice of a rank's partitions, cannot hide.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from buddy_pipeline.partition.graph import (
    GraphNode,
    NodeKind,
    Partition,
    node_table,
    position_only,
)


class Fault(StrEnum):
    """The ways in which partitions can differ from their graph."""

    MISSING = "missing"  # a compute node that no rank has
    DUPLICATE = "duplicate"  # a node more than once, without being replicated over ranks
    UNKNOWN = "unknown"  # a name that is no compute node of the graph
    REPLICATED = "replicated"  # marked replicated, though it depends on tokens or parameters
    NOT_REPLICATED = "not replicated"  # a replicated value used on a rank that never makes it
    ORDER = "order"  # a node that runs after one that follows it in the graph
    PRODUCER = "producer after consumer"  # a value used before it is made
    UNDECLARED_INPUT = "undeclared input"  # used in a partition and made outside, but no input
    UNDECLARED_OUTPUT = "undeclared output"  # made in a partition and used outside, but no output
    NEEDLESS_INPUT = "needless input"  # an input that nothing in the partition uses
    NEEDLESS_OUTPUT = "needless output"  # an output not made in the partition, or not used outside


@dataclass(frozen=True)
class Violation:
    """One fault, at one node; `rank` and `partition` are where, or None if it is nowhere."""

    fault: Fault
    node: str
    rank: int | None
    partition: str | None
    message: str


@dataclass(frozen=True)
class Report:
    """What `verify` saw."""

    world: int
    graph_nodes: int  # parameters, constants and placeholders included
    compute_nodes: int  # those that must be in a partition
    replicated_nodes: int  # compute nodes in partitions marked replicated, each counted once
    partitions: int  # over all ranks, a replicated one once for each rank
    crossing_values: dict[str, tuple[str, ...]]  # "1->0": what rank 1 must send to rank 0
    missing: tuple[str, ...]
    duplicate: tuple[str, ...]
    order_ok: bool  # the ranks, world - 1 first, run the nodes in the graph's own order
    violations: tuple[Violation, ...]

    @property
    def ok(self) -> bool:
        """Whether the partitions are exactly the graph."""
        return not self.violations

    def to_json(self) -> str:
        """The report as an indented JSON object: the fields above, after "ok"."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)


def verify(nodes: Sequence[GraphNode], partitions_by_rank: Sequence[Sequence[Partition]]) -> Report:
    """Compare the partitions of all ranks (index = rank) with the whole graph in execution order.

    Every compute node must be in exactly one partition, or depend on positions alone and be in a
    partition marked replicated on every rank that uses it. Run one after another from rank
    world - 1 down to rank 0, the partitions must keep the graph's order, use no value before it is
    made, and declare as inputs and outputs exactly the values that cross. Raises ValueError if the
    graph itself is malformed.
    """
    node_table(nodes)
    placed = [
        _Placed(rank, partition)
        for rank in reversed(range(len(partitions_by_rank)))
        for partition in partitions_by_rank[rank]
    ]
    violations = [
        *_membership_faults(nodes, placed),
        *_order_faults(nodes, placed),
        *_producer_faults(nodes, placed),
        *_interface_faults(nodes, placed),
    ]
    by_fault: dict[Fault, list[str]] = defaultdict(list)
    for violation in violations:
        by_fault[violation.fault].append(violation.node)
    owned = {node.name for node in nodes if node.kind.is_owned}
    return Report(
        world=len(partitions_by_rank),
        graph_nodes=len(nodes),
        compute_nodes=len(owned),
        replicated_nodes=len(owned & _replicated_names(placed)),
        partitions=len(placed),
        crossing_values=_crossing_values(placed, len(partitions_by_rank)),
        missing=tuple(by_fault[Fault.MISSING]),
        duplicate=tuple(dict.fromkeys(by_fault[Fault.DUPLICATE])),
        order_ok=not by_fault[Fault.ORDER],
        violations=tuple(violations),
    )


class _Placed(NamedTuple):
    """A partition on its rank; lists of these are in execution order, rank world - 1 first."""

    rank: int
    partition: Partition

    def fault(self, fault: Fault, node: str, what: str) -> Violation:
        where = f"{self.partition.name} on rank {self.rank}"
        return Violation(
            fault, node, self.rank, self.partition.name, f"node {node!r}, {where}: {what}"
        )


def _membership_faults(
    nodes: Sequence[GraphNode], placed: Sequence[_Placed]
) -> Iterator[Violation]:
    """Every compute node somewhere, and only there; nothing else anywhere."""
    owned = {node.name for node in nodes if node.kind.is_owned}
    replicable = position_only(nodes)
    homes: dict[str, list[_Placed]] = defaultdict(list)
    for place in placed:
        for name in place.partition.nodes:
            if name not in owned:
                yield place.fault(Fault.UNKNOWN, name, "is no compute node of the graph")
            elif place.partition.replicated and name not in replicable:
                yield place.fault(
                    Fault.REPLICATED, name, "is replicated, but depends on tokens or parameters"
                )
            for other in homes[name]:
                if not (place.partition.replicated and other.partition.replicated) or (
                    place.rank == other.rank
                ):
                    yield place.fault(
                        Fault.DUPLICATE,
                        name,
                        f"is also in {other.partition.name} on rank {other.rank}",
                    )
            homes[name].append(place)
    for node in nodes:
        if node.kind.is_owned and node.name not in homes:
            message = f"node {node.name!r} of module {node.module!r} is on no rank"
            yield Violation(Fault.MISSING, node.name, None, None, message)


def _order_faults(nodes: Sequence[GraphNode], placed: Sequence[_Placed]) -> Iterator[Violation]:
    """The ranks' nodes, one after another, are in graph order; so is each replicated partition."""
    index = {node.name: i for i, node in enumerate(nodes)}
    owned = [place for place in placed if not place.partition.replicated]
    replicated = [[place] for place in placed if place.partition.replicated]
    for sequence in [owned, *replicated]:
        first: dict[str, _Placed] = {}  # a second appearance is a duplicate, not a matter of order
        for place in sequence:
            for name in place.partition.nodes:
                if name in index:
                    first.setdefault(name, place)
        for before, name in pairwise(first):
            if index[before] > index[name]:
                yield first[name].fault(
                    Fault.ORDER, name, f"runs after {before!r}, which follows it in the graph"
                )


def _producer_faults(nodes: Sequence[GraphNode], placed: Sequence[_Placed]) -> Iterator[Violation]:
    """Every value is made before it is used, and a replicated one on the rank that uses it."""
    table = node_table(nodes)
    replicated = _replicated_names(placed)
    everywhere = {name for place in placed for name in place.partition.nodes}
    on_rank: dict[int, set[str]] = defaultdict(set)
    for place in placed:
        on_rank[place.rank].update(place.partition.nodes)

    sent: set[str] = set()  # made so far by partitions that are not replicated
    local: dict[int, set[str]] = defaultdict(set)  # made so far by replicated ones, by rank
    for place in placed:
        made = local[place.rank] if place.partition.replicated else sent
        for name in place.partition.nodes:
            for value in table[name].inputs if name in table else ():
                if value in sent or value in local[place.rank] or value not in everywhere:
                    continue
                if value in replicated and value not in on_rank[place.rank]:
                    yield place.fault(
                        Fault.NOT_REPLICATED, name, f"uses {value!r}, which this rank never makes"
                    )
                else:
                    yield place.fault(
                        Fault.PRODUCER, name, f"uses {value!r}, which is made after it"
                    )
            made.add(name)


def _interface_faults(nodes: Sequence[GraphNode], placed: Sequence[_Placed]) -> Iterator[Violation]:
    """Inputs and outputs are exactly the values that cross the partition's edge."""
    table = node_table(nodes)
    loaded = {n.name for n in nodes if n.kind in (NodeKind.PARAMETER, NodeKind.CONSTANT)}
    readers: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for value in node.inputs:
            readers[value].append(node.name)

    for place in placed:
        part = place.partition
        inside = {name: None for name in part.nodes if name in table}
        used = dict.fromkeys(value for name in inside for value in table[name].inputs)
        arriving = [value for value in used if value not in inside and value not in loaded]
        leaving = [n for n in inside if any(reader not in inside for reader in readers[n])]
        for declared, crossing, undeclared, needless in (
            (part.inputs, arriving, Fault.UNDECLARED_INPUT, Fault.NEEDLESS_INPUT),
            (part.outputs, leaving, Fault.UNDECLARED_OUTPUT, Fault.NEEDLESS_OUTPUT),
        ):
            for name in crossing:
                if name not in declared:
                    yield place.fault(undeclared, name, "crosses the edge undeclared")
            for name in declared:
                if name not in crossing:
                    yield place.fault(needless, name, "is declared, but does not cross the edge")


def _replicated_names(placed: Sequence[_Placed]) -> set[str]:
    return {name for _, part in placed if part.replicated for name in part.nodes}


def _crossing_values(placed: Sequence[_Placed], world: int) -> dict[str, tuple[str, ...]]:
    """What each rank must send to the next: declared by a partition at or above it, used below."""
    owned = [place for place in placed if not place.partition.replicated]
    crossing = {}
    for rank in reversed(range(1, world)):
        used = {name for place in owned if place.rank < rank for name in place.partition.inputs}
        made = [name for place in owned if place.rank >= rank for name in place.partition.outputs]
        crossing[f"{rank}->{rank - 1}"] = tuple(name for name in made if name in used)
    return crossing
