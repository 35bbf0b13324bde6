"""A session: one rank made ready, from a spec to a pipeline that runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.manifest import Plan, runs_unit
from buddy_pipeline.compile.object_builder import ObjectBuilder
from buddy_pipeline.compile.service import build_ahead
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.launcher.balancing import first_ranges, measured_ranges
from buddy_pipeline.launcher.building import default_jobs, plan_model
from buddy_pipeline.launcher.limits import Asked, check_memory
from buddy_pipeline.launcher.loading import LoadedStage, load_stage
from buddy_pipeline.launcher.model import Model, open_model
from buddy_pipeline.launcher.prebuilt import open_prebuilt
from buddy_pipeline.launcher.settings import Balance, PipelineSettings
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import block_role
from buddy_pipeline.ranks.engine import Engine
from buddy_pipeline.ranks.exchange import all_gather
from buddy_pipeline.ranks.faults import end_now, exit_alone, guarded, together
from buddy_pipeline.ranks.kv_memory import available_memory, kv_positions
from buddy_pipeline.ranks.measuring import BlockTimes, block_times
from buddy_pipeline.ranks.messages import Bounds
from buddy_pipeline.ranks.profile import (
    Profiler,
    ProfileSettings,
    check_folder,
    profile_settings,
)
from buddy_pipeline.ranks.roll_call import Attendance, RollCall, attendance_of, attended
from buddy_pipeline.ranks.scheduler import Limits, Scheduler
from buddy_pipeline.ranks.serve import serve
from buddy_pipeline.ranks.slots import Slots
from buddy_pipeline.ranks.stage import Stage, step_memory
from buddy_pipeline.ranks.transport import Loopback, Transport
from buddy_pipeline.ranks.watchdog import WatchedStage
from buddy_pipeline.ranks.world import World, join_world

if TYPE_CHECKING:
    from buddy_pipeline.launcher.tokenizer import Tokenizer

_T = TypeVar("_T")

Check = Callable[["Tokenizer", int], None]
"""Raises UserError for what rank 0 could not do with this tokenizer and context length."""


@dataclass
class Session:
    """One rank of the pipeline: rank 0 has an engine, the others serve it."""

    rank: int
    engine: Engine | None
    tokenizer: Tokenizer | None
    """On rank 0, where there is text."""
    _stage: Stage | WatchedStage
    _ring: Transport | Loopback
    _profiler: Profiler | None

    def serve(self) -> None:
        """Ranks other than 0: computes for the pipeline until rank 0 closes it."""
        assert isinstance(self._ring, Transport)
        serve(self._stage, self._ring)

    def close(self) -> None:
        """Ends the pipeline, on rank 0 for all ranks; rank 0 shows the profile, if there is one."""
        if self.engine is not None:
            self.engine.close()
        if self._profiler is not None:
            self._profiler.finish()


@contextmanager
def open_session(
    settings: PipelineSettings, check: Check | None = None, *, library: bool = False
) -> Iterator[Session]:
    """Meets the other ranks, compiles what is missing, loads this rank's weights.

    What a user can mend on any rank ends all ranks with exit code 2 before anything computes.
    `check` is called on rank 0 before anything is compiled or loaded.

    A command's errors and signals end its process, with one line. With `library` they are the
    calling program's: a world of one raises what goes wrong as it is, and a rank whose failure
    ends all ranks prints its traceback.
    """
    try:
        world = join_world(purpose="generate")
    except UserError as error:
        if library:
            raise
        exit_alone(error)
    alone = world.comm is None
    with nullcontext() if library and alone else guarded(world, show_traceback=library):
        # What costs nothing to find out comes first. Then one rank of each host makes the plan, so
        # that a model that cannot be planned is not tried by one rank after the other.
        part = together(world, lambda: _part(world, settings))
        with nullcontext() if part is None else attended(part, partial(end_now, world)):
            opened = together(world, lambda: _open(world, settings, check))
            if not alone:
                together(world, lambda: _plan(world, opened))
            loaded = _load_balanced(world, opened, settings)
        session = _connect(world, opened, loaded, settings, part)
        try:
            yield session
        except UserError as error:
            if session.engine is None or alone:
                raise
            session.close()
            exit_alone(error)
        session.close()


@dataclass(frozen=True)
class _Opened:
    """What a rank knows before anything is compiled."""

    model: Model
    tokenizer: Tokenizer | None
    ranges: list[range]
    """Layers by rank."""
    cache: Cache
    profile: ProfileSettings | None


def _part(world: World, settings: PipelineSettings) -> RollCall | Attendance | None:
    """This rank's part in the roll call, if there is one."""
    if world.comm is None or settings.step_timeout_s is None:
        return None
    return attendance_of(world.comm, settings.step_timeout_s)


def _open(world: World, settings: PipelineSettings, check: Check | None) -> _Opened:
    cache = Cache.open(settings.cache_dir)
    if settings.build_dir is None and settings.bundle is None:
        model = open_model(settings)
    else:
        model = open_prebuilt(settings, world.rank, world.world, cache)
    profile = profile_settings(settings.profile_out)
    most = settings.max_sequences
    split = settings.split if model.split is None else model.split
    ranges = first_ranges(model, world.world, split, settings.balance, most)
    tokenizer = None
    if world.rank == 0:  # only there is text, so only there are the libraries for it loaded
        from buddy_pipeline.launcher.tokenizer import open_tokenizer

        tokenizer = open_tokenizer(model.checkpoint.tokenizer)
    if tokenizer is not None and check is not None:
        check(tokenizer, model.context)
    if world.rank == 0 and settings.profile_out is not None:
        check_folder(settings.profile_out)
    return _Opened(model, tokenizer, ranges, cache, profile)


def _plan(world: World, opened: _Opened) -> None:
    """Has one rank of each host plan the model and, on all cores, build what the host's ranks need
    as it becomes known; what is not begun by then each builds for itself."""
    if world.local_rank != 0:
        return

    def wanted(unit: str) -> bool:
        roles = ((opened.ranges[r], block_role(r, world.world)) for r in world.neighbours)
        return any(runs_unit(unit, layers, role) for layers, role in roles)

    target = host_target()
    with ObjectBuilder(target, opened.cache, default_jobs()) as builder:
        ahead = build_ahead(builder, wanted)
        plan_model(opened.model, target, opened.cache, show=world.rank == 0, ahead=ahead)
        builder.finish(list(builder.begun))


def _load(
    world: World, opened: _Opened, settings: PipelineSettings, ranges: list[range]
) -> LoadedStage:
    show = world.rank == 0
    layers, asked = ranges[world.rank], _asked(opened.model, settings)

    def check(plan: Plan) -> None:
        need = step_memory(plan, layers, world.rank, world.world)
        check_memory(asked, need, available_memory() // world.local_size)

    return load_stage(
        opened.model, world, layers, settings.threads, asked.sizes(), opened.cache, show, check
    )


def _load_balanced(world: World, opened: _Opened, settings: PipelineSettings) -> LoadedStage:
    """This rank's stage; with measured balance, once more where timing it has moved layers."""
    loaded = together(world, lambda: _load(world, opened, settings, opened.ranges))
    if settings.balance is not Balance.MEASURED or world.comm is None:
        return loaded
    # As many tokens as a decode step of a full pipeline has.
    tokens = min(opened.model.context, -(-settings.max_sequences // world.world))
    times = all_gather(world.comm, block_times(loaded.stage, tokens), BlockTimes)
    ranges = measured_ranges(opened.model.layers, times)
    if world.rank == 0:
        print(f"layers by rank: {','.join(str(len(r)) for r in ranges)}", file=sys.stderr)
    kept = loaded if ranges[world.rank] == opened.ranges[world.rank] else None
    del loaded  # its weights make room for the others
    return together(world, lambda: kept or _load(world, opened, settings, ranges))


def _asked(model: Model, settings: PipelineSettings) -> Asked:
    """The limits of the command line; of a prompt's chunks else that of the spec or of what was
    built."""
    chunk = settings.prefill_chunk or model.defaults.prefill_chunk
    return Asked(settings.max_sequences, chunk, settings.microbatches)


def _connect(
    world: World,
    opened: _Opened,
    loaded: LoadedStage,
    settings: PipelineSettings,
    part: RollCall | Attendance | None,
) -> Session:
    """Puts the stage on the ring and, on rank 0, an engine in front of it."""
    model, asked = opened.model, _asked(opened.model, settings)
    sizes = asked.sizes()
    stage: Stage | WatchedStage = loaded.stage
    tiers = model.defaults.kv_tiers
    positions = kv_positions(world, loaded.stage.kv.position_bytes, settings.kv_memory_bytes)
    together(world, lambda: _check_room(positions, tiers[-1]))
    bounds = Bounds(model.context, sizes.slots, loaded.plan.vocab_size)
    groups, in_flight = asked.groups(world.world), asked.in_flight(world.world)
    most = {"max_changes": asked.changes(), "in_flight": in_flight}

    def make_ring() -> Transport | Loopback:
        if world.world == 1:
            return Loopback(sizes.tokens, sizes.rows, **most)
        return Transport(
            world,
            sizes.tokens,
            sizes.rows,
            loaded.stage.input_bytes,
            loaded.stage.output_bytes,
            bounds,
            **most,
            part=part,
        )

    ring = together(world, make_ring)
    if settings.step_timeout_s is not None:
        stage = WatchedStage(stage, world, settings.step_timeout_s)
    engine = None
    if world.rank == 0:
        limits = Limits(
            stages=world.world,
            tokens=sizes.tokens,
            sequences=settings.max_sequences,
            microbatches=in_flight,
            decode_groups=groups,
            prefill_chunk=asked.prefill_chunk,
        )
        scheduler = Scheduler(limits, Slots(sizes.slots, tiers, positions))
        engine = Engine(stage, ring, scheduler, bounds, adapt=settings.microbatches is None)
    profiler = None
    if opened.profile is not None:
        profiler = Profiler(world, loaded.stage, ring, engine, opened.profile)
    return Session(world.rank, engine, opened.tokenizer, stage, ring, profiler)


def _check_room(positions: int, context: int) -> bool:
    """Raises UserError if a KV cache of so many positions does not hold one sequence."""
    if positions < context:
        raise UserError(
            f"the KV cache has room for {counted(positions, 'token')}, but one sequence may have"
            f" {context}: raise --kv-memory, lower max_token_len in the spec, or use more ranks"
        )
    return True
