"""A session: one rank made ready, from a spec to a pipeline that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.manifest import PartitionPlan, Plan
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.launcher.building import build_objects, default_jobs, plan_model
from buddy_pipeline.launcher.model import Model, open_model
from buddy_pipeline.launcher.settings import PipelineSettings
from buddy_pipeline.launcher.tokenizer import Tokenizer, open_tokenizer
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import block_role, layer_ranges
from buddy_pipeline.ranks.affinity import prepare_threads, threads_for
from buddy_pipeline.ranks.engine import Engine
from buddy_pipeline.ranks.faults import agree, exit_alone, guarded
from buddy_pipeline.ranks.kv_memory import kv_positions
from buddy_pipeline.ranks.messages import Bounds
from buddy_pipeline.ranks.packing import check_parameters, pack_parameters
from buddy_pipeline.ranks.scheduler import Limits, Scheduler
from buddy_pipeline.ranks.serve import serve
from buddy_pipeline.ranks.slots import MOST_CHANGES, Slots, kv_tiers
from buddy_pipeline.ranks.stage import Stage, StageSizes, needed_partitions
from buddy_pipeline.ranks.transport import Loopback, Transport
from buddy_pipeline.ranks.world import World, join_world

_T = TypeVar("_T")

#: Tokens of one step at most: enough to reuse weights from cache, few enough for small buffers.
CHUNK = 512
#: Slots of the KV cache for each sequence that may run: one for it, one for a finished sequence
#: whose prefix may be wanted again.
SLOTS_A_SEQUENCE = 2

Check = Callable[[Tokenizer, int], None]
"""Raises UserError for what rank 0 could not do with this tokenizer and context length."""


@dataclass
class Session:
    """One rank of the pipeline: rank 0 has an engine, the others serve it."""

    rank: int
    engine: Engine | None
    tokenizer: Tokenizer
    _stage: Stage
    _ring: Transport | Loopback

    def serve(self) -> None:
        """Ranks other than 0: computes for the pipeline until rank 0 closes it."""
        assert isinstance(self._ring, Transport)
        serve(self._stage, self._ring)


@contextmanager
def open_session(
    settings: PipelineSettings, check: Check | None = None, *, library: bool = False
) -> Iterator[Session]:
    """Meets the other ranks, compiles what is missing, loads this rank's weights.

    What a user can mend on any rank ends all ranks with exit code 2 before anything computes.
    `check` is called on rank 0 before anything is compiled or loaded.

    A command's errors and signals end its process, with one line. With `library` they are the
    calling program's: a world of one raises what goes wrong as it is, and ranks that must end
    because one has failed print the traceback.
    """
    try:
        world = join_world()
    except UserError as error:
        if library:
            raise
        exit_alone(error)
    alone = world.comm is None
    with nullcontext() if library and alone else guarded(world, show_traceback=library):
        prepared = _together(world, lambda: _prepare(world, settings, check))
        session = _connect(world, prepared, settings)
        try:
            yield session
        except UserError as error:
            if alone:
                raise
            if session.engine is not None:
                session.engine.close()
            exit_alone(error)
        if session.engine is not None:
            session.engine.close()


def _together(world: World, prepare: Callable[[], _T]) -> _T:
    """Runs a preparation on every rank; a user's error on any ends all."""
    if world.comm is None:
        return prepare()
    result, error = None, None
    try:
        result = prepare()
    except UserError as mistake:
        error = str(mistake)
    agree(world, error)
    assert result is not None
    return result


@dataclass(frozen=True)
class _Prepared:
    """What a rank has before it meets the others to run."""

    model: Model
    tokenizer: Tokenizer
    plan: Plan
    stage: Stage
    sizes: StageSizes


def _prepare(world: World, settings: PipelineSettings, check: Check | None) -> _Prepared:
    model = open_model(settings)
    ranges = layer_ranges(model.layers, world.world, settings.split)
    layers, role = ranges[world.rank], block_role(world.rank, world.world)
    tokenizer = open_tokenizer(model.checkpoint.tokenizer)
    if world.rank == 0 and check is not None:
        check(tokenizer, model.context)

    target, cache = host_target(), Cache.open(settings.cache_dir)
    show = world.rank == 0
    plan, _ = plan_model(model, target, cache, show)
    partitions = needed_partitions(plan, layers, role)
    parameters = [p for partition in partitions for p in partition.parameters]
    check_parameters(parameters, model.checkpoint)
    jobs = max(1, default_jobs() // world.local_size)
    build_objects(plan, partitions, target, cache, jobs, show)

    # Compiler processes inherit the affinity, so the team is bound after they are done.
    threads = threads_for(world, settings.threads or model.spec.num_threads)
    prepare_threads(world, threads)
    library = _load(plan, partitions, cache) if partitions else None
    weights = pack_parameters(parameters, model.checkpoint, threads)
    sizes = StageSizes(
        tokens=max(CHUNK, settings.max_sequences, settings.prefill_chunk or 0),
        rows=settings.max_sequences,
        slots=SLOTS_A_SEQUENCE * settings.max_sequences,
        context=model.context,
        threads=threads,
    )
    stage = Stage(plan, layers, role, weights, library, sizes)
    return _Prepared(model, tokenizer, plan, stage, sizes)


def _load(plan: Plan, partitions: tuple[PartitionPlan, ...], cache: Cache) -> Library:
    """The compiled code of these partitions in this process."""
    objects = []
    for key in plan.objects(partitions):
        data = cache.read_object(key)
        if data is None:
            raise UserError(
                f"{cache.object_path(key)} was removed or altered during the start: start again"
            )
        objects.append(data)
    symbols = [plan.templates[p.template].symbol for p in partitions]
    return Library(objects, ["bp_run_stage", *dict.fromkeys(symbols)])


def _connect(world: World, prepared: _Prepared, settings: PipelineSettings) -> Session:
    """Puts the stage on the ring and, on rank 0, an engine in front of it."""
    stage, sizes = prepared.stage, prepared.sizes
    tiers = kv_tiers(sizes.context, prepared.model.spec.kv_tiers)
    positions = kv_positions(world, stage.kv.position_bytes, settings.kv_memory_bytes)
    _together(world, lambda: _check_room(positions, tiers[-1]))
    bounds = Bounds(sizes.context, sizes.slots, prepared.plan.vocab_size)
    groups = settings.microbatches or world.world
    # One more than the groups: a step that waits in front of rank world-1 hides rank 0's sampling.
    in_flight = groups + 1 if world.world > 1 else groups
    max_changes = MOST_CHANGES * sizes.slots
    ring: Transport | Loopback
    if world.world == 1:
        ring = Loopback(sizes.tokens, sizes.rows, max_changes=max_changes, in_flight=in_flight)
    else:
        ring = Transport(
            world,
            sizes.tokens,
            sizes.rows,
            stage.input_bytes,
            stage.output_bytes,
            bounds,
            max_changes=max_changes,
            in_flight=in_flight,
        )
    engine = None
    if world.rank == 0:
        limits = Limits(
            stages=world.world,
            tokens=sizes.tokens,
            sequences=settings.max_sequences,
            microbatches=in_flight,
            decode_groups=groups,
            prefill_chunk=settings.prefill_chunk,
        )
        scheduler = Scheduler(limits, Slots(sizes.slots, tiers, positions))
        engine = Engine(stage, ring, scheduler, bounds, adapt=settings.microbatches is None)
    return Session(world.rank, engine, prepared.tokenizer, stage, ring)


def _check_room(positions: int, context: int) -> bool:
    """Raises UserError if a KV cache of so many positions does not hold one sequence."""
    if positions < context:
        raise UserError(
            f"the KV cache has room for {positions} tokens, but one sequence may have {context}:"
            " raise --kv-memory, lower max_token_len in the spec, or use more ranks"
        )
    return True
