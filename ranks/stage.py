"""A stage: one rank's block of layers, bound to weights and memory, run by one call a step."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.manifest import (
    KV_SPAN,
    SPLIT_UNITS,
    Parameter,
    PartitionPlan,
    Plan,
    StepWord,
    Value,
)
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import BlockRole, block_role
from buddy_pipeline.ranks.kv_cache import KvCache
from buddy_pipeline.ranks.memory_blocks import aligned_zeros
from buddy_pipeline.ranks.messages import Step
from buddy_pipeline.ranks.profile_regions import Region, RegionProfile
from buddy_pipeline.ranks.step_memory import (
    StepMemory,
    internal_places,
    logits_bytes,
    workspace_bytes,
)

#: Symbols of the driver's object that a stage calls.
DRIVER_SYMBOLS = _DRIVER, _TICKS = ("bp_run_stage", "bp_ticks")
#: Words of the step record that change with every step.
_TOKENS, _ROWS, _ROW_INDEX, _POSITIONS, _SLOTS = (
    word.value
    for word in (
        StepWord.TOKENS,
        StepWord.ROWS,
        StepWord.ROW_INDEX,
        StepWord.POSITIONS,
        StepWord.SLOTS,
    )
)
#: int64 words of the barrier: two counters on cache lines of their own.
_BARRIER_WORDS = 16


@dataclass(frozen=True)
class StageSizes:
    """What a stage must have room for."""

    tokens: int  # in one step
    rows: int  # logits in one step
    slots: int  # sequences in the KV cache
    context: int  # positions of one sequence
    threads: int  # of the team


@dataclass(frozen=True)
class _Moving:
    """A word of the args tables whose address changes from step to step."""

    word: int
    base: str  # "ids", "positions", "inputs" or "outputs"
    bytes_per_token: int  # offset inside the payload: values lie one after the other


class Stage:
    """The block of one rank, ready to run.

    `input_bytes` and `output_bytes` are the payload of one token to and from the neighbour ranks:
    the crossing values one after the other, each [tokens, row bytes].
    """

    def __init__(
        self,
        plan: Plan,
        layers: range,
        role: BlockRole,
        weights: Mapping[Parameter, np.ndarray],
        library: Library | None,
        sizes: StageSizes,
    ) -> None:
        partitions = needed_partitions(plan, layers, role)
        self._sizes = sizes
        incoming, outgoing = crossing(plan, layers, role)
        self.is_empty = not partitions
        self.input_bytes = sum(v.row_bytes for v in incoming)
        self.output_bytes = sum(v.row_bytes for v in outgoing)
        self.threads = sizes.threads
        self.regions = [
            Region(partition.unit, partition.name, partition.template, name)
            for partition in partitions
            for name in plan.templates[partition.template].regions
        ]
        """What the team does between barriers in a step, in order."""
        has_head = role in (BlockRole.LAST, BlockRole.SINGLE)
        self.vocab_size = plan.vocab_size if has_head else 0
        self.kv = KvCache([kv for p in partitions for kv in p.kv], sizes.slots, sizes.context)
        self._profile: RegionProfile | None = None
        self._weights = weights  # keeps the memory that the args tables point to
        self._constants = {n: _constant(plan, n) for p in partitions for n in p.constants}
        self._copied = [v for v in outgoing if v in incoming]
        self._offsets = (_offsets(incoming), _offsets(outgoing))

        self._result = aligned_zeros((0,), np.float32)
        places: dict[str, _Moving | np.ndarray] = {
            plan.token_input: _Moving(0, "ids", 0),
            plan.position_input: _Moving(0, "positions", 0),
        }
        if has_head:
            value = plan.values[plan.result]
            self._result = aligned_zeros((sizes.rows, value.stride), np.float32)
            places[plan.result] = self._result
        for value, offset in self._offsets[1].items():
            places[value.name] = _Moving(0, "outputs", offset)
        for value, offset in self._offsets[0].items():
            places[value.name] = _Moving(0, "inputs", offset)
        buffers, bytes_a_token = internal_places(plan, partitions, places)
        memory = [aligned_zeros((sizes.tokens, size // 4), np.float32) for size in bytes_a_token]
        places |= {name: memory[number] for name, number in buffers.items()}
        self._bind(plan, partitions, places)
        self._prepare_step(plan, partitions)
        if library is not None:
            kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
            self._library = library  # keeps the code that addresses point to
            self._driver = kind(library.address(_DRIVER))
            self._ticks = ctypes.CFUNCTYPE(ctypes.c_int64)(library.address(_TICKS))
            for call, partition in zip(self._calls, partitions, strict=True):
                call[0] = library.address(plan.templates[partition.template].symbol)
        self._table_address = self._calls.ctypes.data
        self._record_address = self._record.ctypes.data
        if library is not None:  # the team starts now, and not within the first step
            self._driver(self._table_address, 0, self._record_address)
        self._bound: dict[str, int] = {}

    def run(self, step: Step, inputs: int, outputs: int) -> None:
        """Carries out the step's slot changes, then runs the block on it.

        `inputs` and `outputs` are addresses of the payload that arrived and of the one to write,
        64-byte aligned. The compiled call releases the GIL. Raises ProtocolError for a change that
        cannot be and a token outside its slot's memory.
        """
        if len(step.changes):
            self.kv.apply(step.changes.tolist())
        self.kv.check(step.positions, step.slots)
        record, args, tokens = self._record_words, self._args_words, step.tokens
        record[_TOKENS] = tokens
        record[_ROWS] = len(step.rows)
        record[_ROW_INDEX] = step.rows_address
        record[_POSITIONS] = step.positions_address
        record[_SLOTS] = step.slots_address
        bases = {
            "ids": step.ids_address,
            "positions": step.positions_address,
            "inputs": inputs,
            "outputs": outputs,
        }
        for moving in self._moving:
            args[moving.word] = bases[moving.base] + tokens * moving.bytes_per_token
        for value in self._copied:
            self._copy_through(value, tokens, inputs, outputs)
        self._driver(self._table_address, len(self._calls), self._record_address)

    def logits(self, rows: int) -> np.ndarray:
        """float32 [rows, vocab]: the logits of the last run, valid until the next."""
        return self._result[:rows, : self.vocab_size]

    def profile(self, slots: int) -> RegionProfile:
        """Has the compiled code count regions from now on, at most `slots` of them apart.

        Not for an empty stage, which has no code.
        """
        profile = RegionProfile(self.regions, self._sizes.threads, slots, self._ticks)
        self._profile = profile  # keeps the tables that the record points to
        self._record[StepWord.PROFILE_STRIDE.value] = profile.stride
        self._record[StepWord.PROFILE_OTHER.value] = profile.other
        self.resume_profile()
        return profile

    def stop_profile(self) -> None:
        """Has the compiled code count nothing any more."""
        self._record[StepWord.PROFILE.value] = 0

    def resume_profile(self) -> None:
        """Has it count on, in the tables of before."""
        assert self._profile is not None
        self._record[StepWord.PROFILE.value] = self._profile.address

    def _bind(
        self,
        plan: Plan,
        partitions: Sequence[PartitionPlan],
        places: "Mapping[str, _Moving | np.ndarray]",
    ) -> None:
        """Fills the args table of every partition."""
        templates = [plan.templates[p.template] for p in partitions]
        room = workspace_bytes(plan, partitions) * self._sizes.tokens
        self._workspace = aligned_zeros((room,), np.uint8)
        words: list[int] = []
        starts: list[int] = []
        self._moving: list[_Moving] = []
        self._places = places  # keeps the arrays that words point to
        offsets = iter(self.kv.offsets)
        for partition, template in zip(partitions, templates, strict=True):
            starts.append(len(words))
            for name in (*partition.inputs, *partition.outputs):
                place = places[name]
                if isinstance(place, _Moving):
                    self._moving.append(_Moving(len(words), place.base, place.bytes_per_token))
                    words.append(0)
                else:
                    words.append(place.ctypes.data)
            words += [self._weights[p].ctypes.data for p in partition.parameters]
            words += [self._constants[n].ctypes.data for n in partition.constants]
            at = self._workspace.ctypes.data
            for row_bytes in template.scratch:
                words.append(at)
                at += row_bytes * self._sizes.tokens
            words += [next(offsets) for _ in partition.kv]
        self._args = np.array(words, np.int64)
        self._args_words = self._args.data  # NumPy takes longer for single words
        self._calls = np.zeros((len(partitions), 2), np.int64)
        self._calls[:, 1] = [self._args.ctypes.data + 8 * start for start in starts]

    def _prepare_step(self, plan: Plan, partitions: Sequence[PartitionPlan]) -> None:
        """The step record's lasting words: team, barrier, KV tables, threads' scratch."""
        threads = self._sizes.threads
        need = max([plan.templates[p.template].thread_scratch for p in partitions], default=0)
        stride = -(-need // 4096) * 4096 + 64
        self._thread_scratch = aligned_zeros((stride * threads,), np.uint8)
        size = self._partial_bytes(plan, partitions)
        try:
            self._partials = aligned_zeros((size,), np.uint8)
        except MemoryError:
            raise UserError(
                f"a context of {self._sizes.context:,} positions needs {size:,} bytes beside the KV"
                " cache, which this machine does not have: give the spec a smaller max_token_len"
            ) from None
        self._barrier = aligned_zeros((_BARRIER_WORDS,), np.int64)
        self._record = np.zeros(len(StepWord), np.int64)
        self._record_words = self._record.data
        for word, value in {
            StepWord.TEAM: threads,
            StepWord.BARRIER: self._barrier.ctypes.data,
            StepWord.SLOT_BASE: self.kv.bases.ctypes.data,
            StepWord.SLOT_CAPACITY: self.kv.capacities.ctypes.data,
            StepWord.SCRATCH: self._thread_scratch.ctypes.data,
            StepWord.SCRATCH_STRIDE: stride,
            StepWord.PARTIALS: self._partials.ctypes.data,
        }.items():
            self._record[word.value] = value

    def _partial_bytes(self, plan: Plan, partitions: Sequence[PartitionPlan]) -> int:
        """Room for the partial results of the most units that attention splits into spans."""
        size = max([plan.templates[p.template].partial for p in partitions], default=0)
        spans = -(-self._sizes.context // KV_SPAN)
        return SPLIT_UNITS * self._sizes.threads * spans * size

    def _copy_through(self, value: Value, tokens: int, inputs: int, outputs: int) -> None:
        """A value that arrives and is needed further down is copied to the outgoing payload."""
        source = inputs + tokens * self._offsets[0][value]
        to = outputs + tokens * self._offsets[1][value]
        ctypes.memmove(to, source, tokens * value.row_bytes)


def needed_partitions(plan: Plan, layers: range, role: BlockRole) -> tuple[PartitionPlan, ...]:
    """The partitions that a rank runs; none for a rank that only forwards.

    Position tables are left out where nothing else runs.
    """
    partitions = plan.for_rank(layers, role)
    return partitions if any(p.unit != "positions" for p in partitions) else ()


def crossing(
    plan: Plan, layers: range, role: BlockRole
) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """The values that arrive from the rank before and go to the rank after."""
    first = role in (BlockRole.FIRST, BlockRole.SINGLE)
    last = role in (BlockRole.LAST, BlockRole.SINGLE)
    incoming = () if first else plan.crossing(layers.start)
    outgoing = () if last else plan.crossing(layers.stop)
    return incoming, outgoing


def step_memory(plan: Plan, layers: range, rank: int, world: int) -> StepMemory:
    """What steps take on a rank with these layers."""
    role = block_role(rank, world)
    partitions = needed_partitions(plan, layers, role)
    incoming, outgoing = crossing(plan, layers, role)
    placed = {plan.token_input, plan.position_input, plan.result}
    placed |= {value.name for value in (*incoming, *outgoing)}
    _, sizes = internal_places(plan, partitions, placed)
    return StepMemory(
        rank=rank,
        world=world,
        token_bytes=sum(sizes) + workspace_bytes(plan, partitions),
        row_bytes=logits_bytes(plan, role),
        input_bytes=sum(v.row_bytes for v in incoming),
        output_bytes=sum(v.row_bytes for v in outgoing),
    )


def _offsets(values: Sequence[Value]) -> dict[Value, int]:
    """Bytes a token before each value of a payload."""
    result, at = {}, 0
    for value in values:
        result[value] = at
        at += value.row_bytes
    return result


def _constant(plan: Plan, name: str) -> np.ndarray:
    constant = plan.constants[name]
    array = np.frombuffer(constant.bytes(), constant.dtype)
    result = aligned_zeros(array.shape, array.dtype)
    result[:] = array
    return result
