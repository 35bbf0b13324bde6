"""Compiling from the outside: plans and objects that are missing are made in worker processes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.granularity import COARSE_TEMPLATES, Granularity, Sharing
from buddy_pipeline.compile.manifest import Plan
from buddy_pipeline.compile.object_builder import Built, ObjectBuilder, Progress
from buddy_pipeline.compile.source import is_whole
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.compile.versions import compiler_versions, plan_key, still_current
from buddy_pipeline.compile.worker_process import CompileError, Worker
from buddy_pipeline.partition.graph import GraphNode, Partition
from buddy_pipeline.partition.graph_file import graph_from_json
from buddy_pipeline.partition.layers import block_role
from buddy_pipeline.partition.ownership import block_partitions, partition_graph
from buddy_pipeline.partition.strategies import layer_splitter
from buddy_pipeline.partition.verifier import Report, verify


@dataclass(frozen=True)
class PlanTimes:
    """Seconds that making a plan took; all 0 where the cache had it."""

    total: float = 0.0
    packages: float = 0.0
    """Loading torch, transformers and torch-mlir."""
    export: float = 0.0
    imports: float = 0.0
    """Cutting the graph and importing its islands as MLIR."""


@dataclass(frozen=True)
class Ahead:
    """Who builds objects while the model is still being planned."""

    start: Callable[[], None]
    """Called when planning begins, as there will be something to build."""
    begin: Callable[[str | None, Sequence[str]], None]
    """Called with a unit ("positions", "prelude", a layer's number, "postlude"), or None for what
    every unit needs, and the keys of objects of it whose sources are now in the cache."""


def build_ahead(builder: ObjectBuilder, wanted: Callable[[str], bool] = lambda unit: True) -> Ahead:
    """Has `builder` begin the objects of the units that `wanted` accepts."""

    def begin(unit: str | None, keys: Sequence[str]) -> None:
        if unit is None or wanted(unit):
            for key in keys:
                builder.begin(key)

    return Ahead(builder.start, begin)


def ensure_plan(
    config: Mapping[str, Any],
    variant: Variant,
    target: Target,
    cache: Cache,
    granularity: Granularity = COARSE_TEMPLATES,
    *,
    with_mlir: bool = False,
    ahead: Ahead | None = None,
) -> tuple[Plan, PlanTimes]:
    """The model's plan, from the cache or newly made, and what it took to make.

    The cache then has the object or the MLIR of each of its objects; `with_mlir` asks for the MLIR
    of all, and the graph. `ahead` begins objects as soon as their MLIR is there. Raises UserError
    when the model cannot be planned or the compilers are not installed.
    """
    key = plan_key(config, variant, target, granularity)
    plan = _read_plan(cache, key, with_mlir)
    if plan is not None:
        return plan, PlanTimes()
    with cache.lock(f"plan-{key}"):
        plan = _read_plan(cache, key, with_mlir)  # another rank may have made it meanwhile
        if plan is not None:
            return plan, PlanTimes()
        started = time.perf_counter()
        request = {
            "kind": "plan",
            "key": key,
            "config": dict(config),
            "variant": asdict(variant),
            **asdict(granularity),
        }

        def begin(noted: dict[str, Any]) -> None:
            if ahead is not None:
                ahead.begin(noted["unit"], noted["objects"])

        with Worker(cache, target) as worker:
            if ahead is not None:
                ahead.start()
                ahead.begin(None, _write_early(variant, target, cache, granularity.sharing))
            answer = worker.ask(request, "the model's graph", begin)
        plan = _read_plan(cache, key, with_mlir)
        if plan is None:
            raise CompileError(f"the plan written to {cache.plan_path(key)} cannot be read back")
        total = time.perf_counter() - started
        return plan, PlanTimes(total, answer["packages"], answer["export"], answer["import"])


def _write_early(variant: Variant, target: Target, cache: Cache, sharing: Sharing) -> list[str]:
    """Leaves the sources of what every model of the variant needs in the cache; their keys."""
    # Here, since a warm start has no use for what writes kernels.
    from buddy_pipeline.compile.early_sources import early_sources

    versions = compiler_versions()
    keys = []
    for source in early_sources(variant, target, sharing):
        keys.append(key := source.key(target, versions))
        if not is_whole(cache.source_folder(key)):
            source.write(cache.source_folder(key), cache.write)
    return keys


def missing_objects(keys: Sequence[str], cache: Cache) -> list[str]:
    """The objects that the cache does not have whole."""
    return [key for key in keys if cache.read_object(key) is None]


def ensure_objects(
    keys: Sequence[str],
    target: Target,
    cache: Cache,
    jobs: int,
    progress: Progress = lambda built: None,
) -> list[Built]:
    """Makes sure that every object is in the cache; see `ObjectBuilder.finish`."""
    with ObjectBuilder(target, cache, jobs) as builder:
        return builder.finish(keys, progress)


@dataclass(frozen=True)
class CutGraph:
    """A plan's graph, cut as the plan was."""

    nodes: list[GraphNode]
    partitions: list[Partition]

    @staticmethod
    def read(plan: Plan, family: str, graph: Path) -> "CutGraph":
        """The graph in the file that was written with the plan, of a model of this type.

        Raises OSError or ValueError for a file that is not as it was written.
        """
        nodes = graph_from_json(graph.read_bytes())
        return CutGraph(nodes, partition_graph(nodes, layer_splitter(plan.strategy, family)))

    def verify(self, ranges: Sequence[range]) -> Report:
        """The structural verifier's report on ranks with these layers (index = rank)."""
        by_rank = [
            block_partitions(self.partitions, layers, block_role(rank, len(ranges)))
            for rank, layers in enumerate(ranges)
        ]
        return verify(self.nodes, by_rank)


def _read_plan(cache: Cache, key: str, with_mlir: bool) -> Plan | None:
    """A plan from the cache if it is made with what is installed, and whole with all it needs."""
    text = cache.read_plan(key)
    if text is None:
        return None
    try:
        plan = Plan.from_json(text)
        if with_mlir:
            graph_from_json(cache.graph_path(key).read_bytes())
    except (OSError, ValueError):
        return None
    complete = all(
        (not with_mlir and cache.read_object(k) is not None) or is_whole(cache.source_folder(k))
        for k in plan.objects(plan.partitions)
    )
    return plan if complete and still_current(plan.made_with) else None
