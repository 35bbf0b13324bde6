"""One cost model of a pipeline: memory and time of each stage, and tokens per second of all.

A step of a stage reads its weights once and its tokens' KV cache once each, and multiplies with
every weight once a token; it takes as long as the slower of the two (the roofline model: Williams,
Waterman and Patterson, CACM 52(4), 2009). Attention's own arithmetic is left out: it does 1 to 4
multiplications a cached number, fewer than any CPU does while it reads one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from buddy_pipeline.partition.balance import StageCost
from buddy_pipeline.partition.layers import BlockRole, block_role


@dataclass(frozen=True)
class PartCost:
    """What one part of the model (a layer, the embedding, the head) costs whoever runs it."""

    memory_bytes: float
    """Weights in memory."""
    streamed_bytes: float
    """Weights that a step reads, however many tokens it has: those of experts do not count."""
    flops: float
    """Floating-point operations a token."""
    cache_bytes: float = 0.0
    """KV cache of one position."""
    expert_bytes: float = 0.0
    """Weights of experts, of which a step reads those that its tokens choose."""
    chosen_bytes: float = 0.0
    """Of these, what one token chooses."""

    def __add__(self, other: "PartCost") -> "PartCost":
        return PartCost(
            self.memory_bytes + other.memory_bytes,
            self.streamed_bytes + other.streamed_bytes,
            self.flops + other.flops,
            self.cache_bytes + other.cache_bytes,
            self.expert_bytes + other.expert_bytes,
            self.chosen_bytes + other.chosen_bytes,
        )

    def __sub__(self, other: "PartCost") -> "PartCost":
        return PartCost(
            self.memory_bytes - other.memory_bytes,
            self.streamed_bytes - other.streamed_bytes,
            self.flops - other.flops,
            self.cache_bytes - other.cache_bytes,
            self.expert_bytes - other.expert_bytes,
            self.chosen_bytes - other.chosen_bytes,
        )


NOTHING = PartCost(0.0, 0.0, 0.0)


class ModelCost:
    """The costs of a whole model, and of any block of it.

    layers: of each layer.
    embedding, head: of what the first and the last rank own besides.
    shared_bytes: memory that embedding and head share where one rank has both.
    row_bytes: of one token between two ranks.
    """

    def __init__(
        self,
        layers: Sequence[PartCost],
        embedding: PartCost,
        head: PartCost,
        shared_bytes: float,
        row_bytes: int,
    ) -> None:
        self.layers = len(layers)
        self.embedding = embedding
        self.head = head
        self.shared_bytes = shared_bytes
        self.row_bytes = row_bytes
        self._before = list(accumulate(layers, initial=NOTHING))

    def block(self, layers: range, role: BlockRole) -> PartCost:
        """The cost of the rank with these layers and this role."""
        cost = self._before[layers.stop] - self._before[layers.start]
        if role in (BlockRole.FIRST, BlockRole.SINGLE):
            cost += self.embedding
        if role in (BlockRole.LAST, BlockRole.SINGLE):
            cost += self.head
        if role is BlockRole.SINGLE:
            cost -= PartCost(self.shared_bytes, 0.0, 0.0)
        return cost

    def stage_cost(self, world: int, measure: Callable[[PartCost], float]) -> StageCost:
        """A linear measure of every stage of a pipeline, quick to ask for any block."""
        before = [measure(part) for part in self._before]
        nothing = range(0)
        extras = [measure(self.block(nothing, block_role(rank, world))) for rank in range(world)]
        return lambda rank, layers: before[layers.stop] - before[layers.start] + extras[rank]


@dataclass(frozen=True)
class Host:
    """What one rank has of its host."""

    name: str
    memory: float
    """bytes"""
    bandwidth: float
    """bytes/s read from memory"""
    flops: float
    """floating-point operations a second"""


@dataclass(frozen=True)
class Link:
    """The way from one rank to the next."""

    latency: float
    """s"""
    bandwidth: float
    """bytes/s"""

    def seconds(self, size: float) -> float:
        """Time of one message of `size` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Workload:
    """What the pipeline does, for memory and for speed."""

    sequences: int
    """At once."""
    context: int
    """Positions that each sequence's KV cache has room for; half of them are taken on average."""


#: Bytes of a rank's process besides weights and KV cache: Python, NumPy, LLVM's loader and message
#: buffers. 188 to 196 MB were seen on four ranks of SmolLM2-135M.
PROCESS_BYTES = 190e6


def stage_memory(cost: PartCost, work: Workload) -> float:
    """Bytes of a stage's process with a full KV cache."""
    return PROCESS_BYTES + cost.memory_bytes + cost.cache_bytes * work.context * work.sequences


def stage_seconds(cost: PartCost, host: Host, tokens: float, context: int) -> float:
    """One step of a stage with one token of each of `tokens` sequences, s."""
    read = _step_bytes(cost, tokens, context)
    return max(read / host.bandwidth, tokens * cost.flops / host.flops)


def _step_bytes(cost: PartCost, tokens: float, context: int) -> float:
    weights = cost.streamed_bytes + _expert_bytes(cost, tokens)
    return weights + tokens * cost.cache_bytes * context / 2


def _expert_bytes(cost: PartCost, tokens: float) -> float:
    """Of the experts that some token chooses, if tokens choose without regard to each other and
    all experts are chosen as often."""
    if cost.expert_bytes <= 0:
        return 0.0
    share = min(1.0, cost.chosen_bytes / cost.expert_bytes)
    return cost.expert_bytes * (1 - (1 - share) ** tokens)


def memory_share(model: ModelCost, hosts: Sequence[Host], work: Workload) -> StageCost:
    """Of each stage: the share of its host's memory that it needs. For balancing memory."""
    needs = model.stage_cost(len(hosts), lambda part: stage_memory(part, work))
    return lambda rank, layers: needs(rank, layers) / hosts[rank].memory


def step_time(model: ModelCost, hosts: Sequence[Host], work: Workload) -> StageCost:
    """Of each stage: seconds of a decode step with its share of the sequences, infinite for what
    does not fit its host's memory. For balancing speed."""
    world = len(hosts)
    tokens = max(1.0, work.sequences / world)
    needs = model.stage_cost(world, lambda part: stage_memory(part, work))
    reads = model.stage_cost(world, lambda part: _step_bytes(part, tokens, work.context))
    flops = model.stage_cost(world, lambda part: tokens * part.flops)

    def cost(rank: int, layers: range) -> float:
        host = hosts[rank]
        if needs(rank, layers) > host.memory:
            return math.inf
        return max(reads(rank, layers) / host.bandwidth, flops(rank, layers) / host.flops)

    return cost


@dataclass(frozen=True)
class StagePrediction:
    """What one rank is predicted to need and to take."""

    layers: range
    host: Host
    weights: float
    cache: float
    """bytes, for all sequences at full context"""
    memory: float
    """bytes of the whole process"""
    seconds: float
    """of a decode step with one token"""

    @property
    def fits(self) -> bool:
        """Whether its host has the memory."""
        return self.memory <= self.host.memory


@dataclass(frozen=True)
class Prediction:
    """What a split is predicted to do."""

    stages: tuple[StagePrediction, ...]
    """By rank."""
    one_sequence: float
    """tokens/s"""
    many_sequences: float
    """tokens/s of all sequences together"""
    microbatches: int
    """How many the sequences are dealt to for that."""


def predict(
    model: ModelCost,
    ranges: Sequence[range],
    hosts: Sequence[Host],
    links: Sequence[Link],
    work: Workload,
) -> Prediction:
    """The model dealt out to ranks with these layers.

    hosts: by rank. links: by rank, from that rank to the next lower one, rank 0's back to the last.
    """
    world = len(ranges)
    costs = [model.block(layers, block_role(rank, world)) for rank, layers in enumerate(ranges)]
    stages = tuple(
        StagePrediction(
            layers=layers,
            host=host,
            weights=cost.memory_bytes,
            cache=cost.cache_bytes * work.context * work.sequences,
            memory=stage_memory(cost, work),
            seconds=stage_seconds(cost, host, 1, work.context),
        )
        for layers, host, cost in zip(ranges, hosts, costs, strict=True)
    )

    def rate(sequences: int, microbatches: int) -> float:
        """Tokens/s of decoding. A microbatch goes round again when it is back and the slowest
        stage or link has done all others."""
        tokens = sequences / microbatches
        steps = [
            stage_seconds(cost, host, tokens, work.context)
            for cost, host in zip(costs, hosts, strict=True)
        ]
        hops = [link.seconds(tokens * model.row_bytes) for link in links] if world > 1 else []
        return sequences / max(sum(steps) + sum(hops), microbatches * max(*steps, *hops, 0.0))

    most = min(work.sequences, world + 1)
    choices = {1, most, min(most, world), *(1 << i for i in range(most.bit_length()))}
    best = max(choices, key=lambda count: (rate(work.sequences, count), -count))
    return Prediction(stages, rate(1, 1), rate(work.sequences, best), best)
