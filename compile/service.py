"""Compiling from the outside: plans and objects that are missing are made in worker processes."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.granularity import COARSE_TEMPLATES, Granularity
from buddy_pipeline.compile.manifest import Plan
from buddy_pipeline.compile.source import INDEX, is_whole
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.compile.versions import installed, plan_key, still_current
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.graph_file import graph_from_json
from buddy_pipeline.partition.layers import block_role
from buddy_pipeline.partition.ownership import block_partitions, partition_graph
from buddy_pipeline.partition.strategies import layer_splitter
from buddy_pipeline.partition.verifier import Report, verify

#: Seconds that one request may take; a pass that does not end is an error, not a hang.
TIME_LIMIT = 600.0


class CompileError(Exception):
    """The compiler failed on something that is not the user's mistake; one line, names the
    fragment and where its MLIR is.

    `key` is the object's, where it was one that failed.
    """

    key: str | None = None


@dataclass(frozen=True)
class Built:
    """One object that was made or found: its name, whether it was in the cache, and seconds."""

    name: str
    key: str
    from_cache: bool
    seconds: float


Progress = Callable[[Built], None]
"""Called with each object as it becomes ready."""


@dataclass(frozen=True)
class PlanTimes:
    """Seconds that making a plan took; all 0 where the cache had it."""

    total: float = 0.0
    packages: float = 0.0
    """Loading torch, transformers and torch-mlir."""
    export: float = 0.0
    imports: float = 0.0
    """Cutting the graph and importing its islands as MLIR."""


def ensure_plan(
    config: Mapping[str, Any],
    variant: Variant,
    target: Target,
    cache: Cache,
    granularity: Granularity = COARSE_TEMPLATES,
    *,
    with_mlir: bool = False,
) -> tuple[Plan, PlanTimes]:
    """The model's plan, from the cache or newly made, and what it took to make.

    The cache then has the object or the MLIR of each of its objects; `with_mlir` asks for the MLIR
    of all, and the graph. Raises UserError when the model cannot be planned or the compilers are
    not installed.
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
        }
        with _Worker(cache, target) as worker:
            answer = worker.ask({**request, **asdict(granularity)}, "the model's graph")
        plan = _read_plan(cache, key, with_mlir)
        if plan is None:
            raise CompileError(f"the plan written to {cache.plan_path(key)} cannot be read back")
        total = time.perf_counter() - started
        return plan, PlanTimes(total, answer["packages"], answer["export"], answer["import"])


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
    """Makes sure that every object is in the cache, building with `jobs` workers at once.

    Where other processes fill the same cache, each builds what none has begun yet, and only then
    waits for what the others are at.
    """
    missing = missing_objects(keys, cache)
    results = [Built(_object_name(cache, k), k, True, 0.0) for k in keys if k not in missing]
    if not missing:
        return results
    missing.sort(key=lambda k: -_source_size(cache, k))  # the longest first
    with (
        _Workers(cache, target) as workers,
        ThreadPoolExecutor(max(1, min(jobs, len(missing)))) as pool,
    ):
        try:
            for wait in (False, True):
                tries = [pool.submit(_build, key, cache, workers, wait) for key in missing]
                for key, attempt in zip(list(missing), tries, strict=True):
                    built = attempt.result()
                    if built is not None:
                        missing.remove(key)
                        progress(built)
                        results.append(built)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # begin nothing more
            raise
    return results


def _build(key: str, cache: Cache, workers: "_Workers", wait: bool) -> Built | None:
    """Builds one object; None if another process is at it and `wait` is false."""
    name = _object_name(cache, key)
    with cache.lock(key, wait) as mine:
        if not mine:
            return None
        if cache.read_object(key) is not None:
            return Built(name, key, True, 0.0)
        folder = cache.source_folder(key)
        try:
            answer = workers.mine().ask({"kind": "object", "key": key}, f"'{name}' ({folder})")
        except CompileError as error:
            error.key = key
            raise
        return Built(name, key, False, answer["seconds"])


def verify_split(plan: Plan, family: str, ranges: Sequence[range], cache: Cache) -> Report:
    """The structural verifier's report on the graph of a plan from the cache (`with_mlir`), cut as
    the plan was and dealt to ranks with these layers (index = rank)."""
    nodes = graph_from_json(cache.graph_path(plan.key).read_text())
    partitions = partition_graph(nodes, layer_splitter(plan.strategy, family))
    by_rank = [
        block_partitions(partitions, layers, block_role(rank, len(ranges)))
        for rank, layers in enumerate(ranges)
    ]
    return verify(nodes, by_rank)


def _read_plan(cache: Cache, key: str, with_mlir: bool) -> Plan | None:
    """A plan from the cache if it is made with what is installed, and whole with all it needs."""
    text = cache.read_plan(key)
    if text is None:
        return None
    try:
        plan = Plan.from_json(text)
        if with_mlir:
            graph_from_json(cache.graph_path(key).read_text())
    except (OSError, ValueError):
        return None
    complete = all(
        (not with_mlir and cache.read_object(k) is not None) or is_whole(cache.source_folder(k))
        for k in plan.objects(plan.partitions)
    )
    return plan if complete and still_current(plan.made_with) else None


def _object_name(cache: Cache, key: str) -> str:
    try:
        return str(json.loads((cache.source_folder(key) / INDEX).read_text())["name"])
    except (OSError, ValueError, KeyError):
        return key


def _source_size(cache: Cache, key: str) -> int:
    return sum(path.stat().st_size for path in cache.source_folder(key).glob("*.mlir"))


class _Worker:
    """One worker process, kept warm between requests."""

    def __init__(self, cache: Cache, target: Target) -> None:
        _require_compilers()
        self._common = {"cache": str(cache.root), "target": asdict(target)}
        # A worker must not take itself for a rank of the job that started it.
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_", "OMPI_"))
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "buddy_pipeline.compile.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._collect_errors, daemon=True)
        self._reader.start()

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that it never read
                    stream.close()

    def _collect_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.rstrip())
            del self._errors[:-50]

    def ask(self, request: dict[str, Any], what: str) -> dict[str, Any]:
        """Sends a request and waits for its answer; `what` names its object in error messages."""
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({**self._common, **request}) + "\n")
            self._process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if not selector.select(TIME_LIMIT):
                    raise CompileError(f"compiling {what} took more than {TIME_LIMIT:.0f} s")
            line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._reader.join()
            last = next((text for text in reversed(self._errors) if text.strip()), "no output")
            raise CompileError(
                f"the compiler died (status {status}) while compiling {what}; its last line: {last}"
            )
        answer = json.loads(line)
        if "user_error" in answer:
            raise UserError(answer["user_error"])
        if not answer["ok"]:
            message = answer["error"].replace("\n", " ")
            raise CompileError(f"compiling {what} failed: {message}")
        return answer


class _Workers:
    """A worker for each thread of a pool, started when first needed."""

    def __init__(self, cache: Cache, target: Target) -> None:
        self._make = lambda: _Worker(cache, target)
        self._local = threading.local()
        self._all: list[_Worker] = []

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._all:
            worker.__exit__()

    def mine(self) -> _Worker:
        """The calling thread's worker."""
        if not hasattr(self._local, "worker"):
            self._local.worker = self._make()
            self._all.append(self._local.worker)
        worker: _Worker = self._local.worker
        return worker


def _require_compilers() -> None:
    missing = [p for p in ("torch", "torch-mlir", "xtc-mlir-python-bindings") if not installed(p)]
    if missing:
        raise UserError(
            f"the model is not compiled yet and {', '.join(missing)} is not installed; "
            "install buddy-pipeline[compile], or give a filled --cache-dir"
        )
