"""From an opened model to a stage that can run: compile what is missing, load this rank's share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.loader import Library
from buddy_pipeline.compile.manifest import PartitionPlan, Plan, runs_unit
from buddy_pipeline.compile.object_builder import ObjectBuilder
from buddy_pipeline.compile.service import build_ahead
from buddy_pipeline.compile.target import Target, host_target
from buddy_pipeline.launcher.building import build_objects, default_jobs, plan_model
from buddy_pipeline.launcher.model import Model
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.layers import block_role
from buddy_pipeline.ranks.affinity import prepare_threads, threads_for
from buddy_pipeline.ranks.messages import Bounds
from buddy_pipeline.ranks.packing import check_parameters, pack_parameters
from buddy_pipeline.ranks.playback import Playback
from buddy_pipeline.ranks.stage import DRIVER_SYMBOLS, Stage, StageSizes, needed_partitions
from buddy_pipeline.ranks.world import World, join_world


@dataclass(frozen=True)
class StepSizes:
    """The most that one step carries, and the sequences there are."""

    tokens: int
    rows: int
    """Tokens whose logits are wanted."""
    slots: int


@dataclass(frozen=True)
class LoadedStage:
    """One rank's stage, and what it was made from."""

    plan: Plan
    partitions: tuple[PartitionPlan, ...]
    stage: Stage
    threads: int


def load_stage(
    model: Model,
    world: World,
    layers: range,
    threads: int | None,
    sizes: StepSizes,
    cache: Cache,
    show: bool,
    check: Callable[[Plan], None] = lambda plan: None,
    target: Target | None = None,
) -> LoadedStage:
    """The stage with `layers` on this rank, compiled for `target` or else this CPU.

    threads: of the team; None takes the model's default, else one for each core of this rank.
    show: whether progress of compiling goes to standard error.
    check: called before anything is built or loaded for this rank.

    Sets the process up for its threads, so a process loads one team size. Raises UserError for
    weights that do not fit the model and for what cannot be compiled.
    """
    role, target = block_role(world.rank, world.world), target or host_target()
    jobs = max(1, default_jobs() // world.local_size)
    with ObjectBuilder(target, cache, jobs) as builder:
        ahead = build_ahead(builder, lambda unit: runs_unit(unit, layers, role))
        plan, _ = plan_model(model, target, cache, show, ahead)
        check(plan)
        partitions = needed_partitions(plan, layers, role)
        parameters = list(dict.fromkeys(p for part in partitions for p in part.parameters))
        weights = None if model.prebuilt is None else model.prebuilt.weights(parameters)
        if weights is None:
            check_parameters(parameters, model.checkpoint)
        keys = plan.objects(partitions) if partitions else []
        if model.prebuilt is None:
            build_objects(plan, partitions, builder, cache, show)
            objects = [_object(key, cache) for key in keys]
        else:
            objects = model.prebuilt.objects(keys)

    # Compiler processes inherit the affinity, so the team is bound after they are done.
    team = threads_for(world, threads or model.defaults.threads)
    prepare_threads(world, team)
    symbols = [plan.templates[p.template].symbol for p in partitions]
    exported = [*DRIVER_SYMBOLS, *dict.fromkeys(symbols)]
    library = Library(objects, exported) if partitions else None
    if weights is None:
        weights = pack_parameters(parameters, model.checkpoint, team)
    room = StageSizes(sizes.tokens, sizes.rows, sizes.slots, model.context, team)
    stage = Stage(plan, layers, role, weights, library, room)
    return LoadedStage(plan, partitions, stage, team)


@contextmanager
def open_engine(
    model: Model,
    threads: int | None,
    sizes: StepSizes,
    cache: Cache,
    show: bool = False,
    target: Target | None = None,
) -> Iterator[tuple[Playback, LoadedStage]]:
    """The whole model in this process, without MPI; arguments and errors as in `load_stage`."""
    layers = range(model.layers)
    loaded = load_stage(
        model, join_world({}), layers, threads, sizes, cache, show=show, target=target
    )
    bounds = Bounds(model.context, sizes.slots, loaded.plan.vocab_size)
    yield Playback(loaded.stage, bounds, tokens=sizes.tokens, rows=sizes.rows), loaded


def _object(key: str, cache: Cache) -> bytes:
    """An object that has just been built."""
    data = cache.read_object(key)
    if data is None:
        raise UserError(
            f"{cache.object_path(key)} was removed or altered during the start: start again"
        )
    return data
