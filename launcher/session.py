"""A session: one rank made ready, from a spec to a pipeline that runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.manifest import Plan
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.launcher.answer import check_request
from buddy_pipeline.launcher.balancing import first_ranges, measured_ranges
from buddy_pipeline.launcher.building import plan_model
from buddy_pipeline.launcher.loading import LoadedStage, StepSizes, load_stage
from buddy_pipeline.launcher.model import Model, open_model
from buddy_pipeline.launcher.settings import Balance, RunSettings
from buddy_pipeline.launcher.tokenizer import Tokenizer, open_tokenizer
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.engine import Engine
from buddy_pipeline.ranks.faults import agree, exit_alone, guarded
from buddy_pipeline.ranks.measuring import BlockTimes, block_times
from buddy_pipeline.ranks.messages import Bounds
from buddy_pipeline.ranks.profile import (
    Profiler,
    ProfileSettings,
    check_folder,
    profile_settings,
)
from buddy_pipeline.ranks.sampling import Sampler, SamplingOptions, make_sampler
from buddy_pipeline.ranks.serve import serve
from buddy_pipeline.ranks.stage import Stage
from buddy_pipeline.ranks.transport import Loopback, Transport
from buddy_pipeline.ranks.world import World, join_world

_T = TypeVar("_T")

#: Tokens of one step at most: enough to reuse weights from cache, few enough for small buffers.
CHUNK = 512
#: Sequences in the KV cache, and logits rows of one step.
SLOTS = ROWS = 1


@dataclass
class Session:
    """One rank of the pipeline: rank 0 has an engine, the others serve it."""

    rank: int
    engine: Engine | None
    tokenizer: Tokenizer
    _stage: Stage
    _ring: Transport | Loopback
    _profiler: Profiler | None

    def serve(self) -> None:
        """Ranks other than 0: computes for the pipeline until rank 0 closes it."""
        assert isinstance(self._ring, Transport)
        serve(self._stage, self._ring)

    def sampler(self, options: SamplingOptions) -> Sampler:
        """A sampler whose calls the profile sees, if there is one."""
        sample = make_sampler(options)
        return sample if self._profiler is None else self._profiler.sampler(sample)

    def close(self) -> None:
        """Ends the pipeline, on rank 0 for all ranks; rank 0 shows the profile, if there is one."""
        if self.engine is not None:
            self.engine.close()
        if self._profiler is not None:
            self._profiler.finish()


@contextmanager
def open_session(settings: RunSettings) -> Iterator[Session]:
    """Meets the other ranks, compiles what is missing, loads this rank's weights.

    What a user can mend on any rank ends all ranks with exit code 2 before anything computes.
    """
    try:
        world = join_world()
    except UserError as error:
        exit_alone(error)
    with guarded(world):
        # What costs nothing to find out comes first. Then one rank of each host makes the plan, so
        # that a model that cannot be planned is not tried by one rank after the other.
        opened = _together(world, lambda: _open(world, settings))
        if world.world > 1:
            _together(world, lambda: _plan(world, opened) if world.local_rank == 0 else None)
        session = _connect(world, opened, _load_balanced(world, opened, settings))
        try:
            yield session
        except UserError as error:
            if session.engine is None:
                raise
            session.close()
            exit_alone(error)
        session.close()


def _together(world: World, prepare: Callable[[], _T]) -> _T:
    """Runs a preparation on every rank; a user's error on any ends all."""
    outcome: _T | UserError
    try:
        outcome = prepare()
    except UserError as mistake:
        outcome = mistake
    agree(world, str(outcome) if isinstance(outcome, UserError) else None)
    assert not isinstance(outcome, UserError)
    return outcome


@dataclass(frozen=True)
class _Opened:
    """What a rank knows before anything is compiled."""

    model: Model
    tokenizer: Tokenizer
    ranges: list[range]
    """Layers by rank."""
    cache: Cache
    profile: ProfileSettings | None


def _open(world: World, settings: RunSettings) -> _Opened:
    model = open_model(settings)
    profile = profile_settings(settings.profile_out)
    ranges = first_ranges(model, world.world, settings.split, settings.balance, SLOTS)
    tokenizer = open_tokenizer(model.checkpoint.tokenizer)
    if world.rank == 0:
        check_request(settings, tokenizer, model.context)
        if settings.profile_out is not None:
            check_folder(settings.profile_out)
    return _Opened(model, tokenizer, ranges, Cache.open(settings.cache_dir), profile)


def _plan(world: World, opened: _Opened) -> Plan:
    return plan_model(opened.model, host_target(), opened.cache, show=world.rank == 0)[0]


def _load(world: World, opened: _Opened, settings: RunSettings, ranges: list[range]) -> LoadedStage:
    """This rank's stage: its code compiled where it is missing, its weights packed."""
    layers, sizes = ranges[world.rank], StepSizes(CHUNK, ROWS, SLOTS)
    show = world.rank == 0
    return load_stage(opened.model, world, layers, settings.threads, sizes, opened.cache, show)


def _load_balanced(world: World, opened: _Opened, settings: RunSettings) -> LoadedStage:
    """This rank's stage; with measured balance, once more where timing it has moved layers."""
    loaded = _together(world, lambda: _load(world, opened, settings, opened.ranges))
    if settings.balance is not Balance.MEASURED or world.comm is None:
        return loaded
    times: list[BlockTimes] = world.comm.allgather(block_times(loaded.stage))
    ranges = measured_ranges(opened.model.layers, times)
    if world.rank == 0 and settings.stats:
        print(f"layers by rank: {','.join(str(len(r)) for r in ranges)}", file=sys.stderr)
    kept = loaded if ranges[world.rank] == opened.ranges[world.rank] else None
    del loaded  # its weights make room for the others
    return _together(world, lambda: kept or _load(world, opened, settings, ranges))


def _connect(world: World, opened: _Opened, loaded: LoadedStage) -> Session:
    """Puts the stage on the ring."""
    stage = loaded.stage
    bounds = Bounds(opened.model.context, SLOTS, loaded.plan.vocab_size)
    ring: Transport | Loopback
    if world.world == 1:
        ring = Loopback(CHUNK, ROWS)
    else:
        ring = Transport(world, CHUNK, ROWS, stage.input_bytes, stage.output_bytes, bounds)
    engine = Engine(stage, ring, bounds) if world.rank == 0 else None
    profiler = None if opened.profile is None else Profiler(world, stage, ring, opened.profile)
    return Session(world.rank, engine, opened.tokenizer, stage, ring, profiler)
