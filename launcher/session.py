"""A session: one rank made ready, from a spec to a pipeline that runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.launcher.answer import check_request
from buddy_pipeline.launcher.balancing import first_ranges, measured_ranges
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
        prepared = _together(world, lambda: _prepare(world, settings))
        if settings.balance is Balance.MEASURED and world.comm is not None:
            prepared = _rebalance(world, prepared, settings)
        session = _connect(world, prepared)
        try:
            yield session
        except UserError as error:
            if session.engine is not None:
                session.close()
            exit_alone(error)
        session.close()


def _together(world: World, prepare: Callable[[], _T]) -> _T:
    """Runs a preparation on every rank; a user's error on any ends all."""
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
    ranges: list[range]
    loaded: LoadedStage
    profile: ProfileSettings | None


def _prepare(world: World, settings: RunSettings) -> _Prepared:
    model = open_model(settings)
    profile = profile_settings(settings.profile_out)
    ranges = first_ranges(model, world.world, settings.split, settings.balance, SLOTS)
    tokenizer = open_tokenizer(model.checkpoint.tokenizer)
    if world.rank == 0:
        check_request(settings, tokenizer, model.context)
        if settings.profile_out is not None:
            check_folder(settings.profile_out)
    loaded = _load(world, settings, model, ranges)
    return _Prepared(model, tokenizer, ranges, loaded, profile)


def _load(
    world: World,
    settings: RunSettings,
    model: Model,
    ranges: list[range],
    before: LoadedStage | None = None,
) -> LoadedStage:
    """This rank's stage; weights of the one that it had before are taken over."""
    sizes = StepSizes(CHUNK, ROWS, SLOTS)
    cache = Cache.open(settings.cache_dir)
    show = world.rank == 0
    layers = ranges[world.rank]
    return load_stage(model, world, layers, settings.threads, sizes, cache, show, before)


def _rebalance(world: World, prepared: _Prepared, settings: RunSettings) -> _Prepared:
    """Times every block on its rank and moves layers so that the slowest stage is fastest."""
    model, before = prepared.model, prepared.ranges
    times: list[BlockTimes] = world.comm.allgather(block_times(prepared.loaded.stage))
    ranges = measured_ranges(model.layers, times)
    if world.rank == 0 and settings.stats:
        print(f"layers by rank: {','.join(str(len(r)) for r in ranges)}", file=sys.stderr)

    def move() -> _Prepared:
        if ranges[world.rank] == before[world.rank]:
            return replace(prepared, ranges=ranges)
        loaded = _load(world, settings, model, ranges, prepared.loaded)
        return replace(prepared, ranges=ranges, loaded=loaded)

    return _together(world, move)


def _connect(world: World, prepared: _Prepared) -> Session:
    """Puts the stage on the ring."""
    stage, plan = prepared.loaded.stage, prepared.loaded.plan
    bounds = Bounds(prepared.model.context, SLOTS, plan.vocab_size)
    ring: Transport | Loopback
    if world.world == 1:
        ring = Loopback(CHUNK, ROWS)
    else:
        ring = Transport(world, CHUNK, ROWS, stage.input_bytes, stage.output_bytes, bounds)
    engine = Engine(stage, ring, bounds) if world.rank == 0 else None
    profiler = None if prepared.profile is None else Profiler(world, stage, ring, prepared.profile)
    return Session(world.rank, engine, prepared.tokenizer, stage, ring, profiler)
