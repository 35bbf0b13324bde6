"""One partition alone: a stage of nothing else, run on values that a caller has saved."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.manifest import KV_BLOCK, Parameter, PartitionPlan, Plan, Value
from buddy_pipeline.partition.layers import BlockRole
from buddy_pipeline.ranks.messages import Kind, SlotChange, StepBuffer
from buddy_pipeline.ranks.stage import Stage, StageSizes

_NUMPY: dict[str, type] = {"f32": np.float32, "i64": np.int64}


class LonePartition:
    """A partition of a plan with its weights and code, for `tokens` tokens of one sequence.

    Attributes:
        inputs: the values it reads, by name: arrays [tokens, elements], but token ids [tokens].
            Positions are not among them: tokens are at 0, 1, 2, …
        outputs: the values it makes, arrays [tokens, elements].
    """

    def __init__(
        self,
        plan: Plan,
        partition: PartitionPlan,
        weights: Mapping[Parameter, np.ndarray],
        library: Library,
        tokens: int,
        threads: int,
    ) -> None:
        self.inputs = partition_inputs(plan, partition)
        self.outputs = {name: plan.values[name] for name in partition.outputs}
        self._ids = plan.token_input
        self._tokens = tokens
        self._capacity = -(-tokens // KV_BLOCK) * KV_BLOCK
        sizes = StageSizes(tokens, rows=tokens, slots=1, context=self._capacity, threads=threads)
        alone = _alone(plan, partition)
        self._stage = Stage(alone, range(1), BlockRole.MIDDLE, weights, library, sizes)
        self._arriving = StepBuffer(tokens, tokens, self._stage.input_bytes, max_changes=1)
        self._leaving = StepBuffer(tokens, tokens, self._stage.output_bytes)

    def run(self, values: Mapping[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
        """Runs all tokens, `step` of them at a time, on arrays for each of `inputs`; returns arrays
        for each of `outputs`."""
        pieces = [
            self._run_step(values, start, min(start + step, self._tokens))
            for start in range(0, self._tokens, step)
        ]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in self.outputs}

    def _run_step(
        self, values: Mapping[str, np.ndarray], start: int, end: int
    ) -> dict[str, np.ndarray]:
        tokens = end - start
        changes = [] if start else [SlotChange(0, self._capacity, 0, 0)]
        step = self._arriving.begin(Kind.STEP, 0, tokens, rows=tokens, changes=len(changes))
        following = self._leaving.begin(Kind.STEP, 0, tokens, rows=tokens)
        step.slots[:] = 0
        step.positions[:] = np.arange(start, end)
        step.rows[:] = np.arange(tokens)
        step.ids[:] = values[self._ids][start:end] if self._ids in self.inputs else 0
        if changes:
            step.changes[:] = changes
        crossing = [value for name, value in self.inputs.items() if name != self._ids]
        for value, rows in zip(crossing, _rows(crossing, step.payload, tokens), strict=True):
            rows[:] = values[value.name][start:end]
        self._stage.run(step, step.payload_address, following.payload_address)
        made = _rows(list(self.outputs.values()), following.payload, tokens)
        return {name: rows.copy() for name, rows in zip(self.outputs, made, strict=True)}


def partition_inputs(plan: Plan, partition: PartitionPlan) -> dict[str, Value]:
    """The values, by name, that a partition needs besides the positions of its tokens."""
    return {name: plan.values[name] for name in partition.inputs if name != plan.position_input}


def _alone(plan: Plan, partition: PartitionPlan) -> Plan:
    """The plan of a pipeline with this partition as its one layer: what it reads arrives, what it
    makes leaves."""
    step = (plan.token_input, plan.position_input)
    given = tuple(name for name in partition.inputs if name not in step)
    before = PartitionPlan("before", "prelude", "", (), given, (), (), ())
    behind = PartitionPlan("behind", "postlude", "", partition.outputs, (), (), (), ())
    return replace(plan, layers=1, partitions=(before, replace(partition, unit="0"), behind))


def _rows(values: Sequence[Value], payload: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Views of the values that lie one after the other in a payload, each [tokens, elements]."""
    views, at = [], 0
    for value in values:
        end = at + tokens * value.row_bytes
        rows: np.ndarray = payload[at:end].view(_NUMPY[value.dtype]).reshape(tokens, value.stride)
        views.append(rows[:, : value.elements])
        at = end
    return views
