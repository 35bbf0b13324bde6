"""Objects in the making: worker processes that build what the cache lacks, as it becomes known."""

import json
import queue
import threading
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.source import INDEX
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.worker_process import CompileError, Worker


@dataclass(frozen=True)
class Built:
    """One object that was made or found: its name, whether it was in the cache, and seconds."""

    name: str
    key: str
    from_cache: bool
    seconds: float


Progress = Callable[[Built], None]
"""Called with each object as it becomes ready."""


class ObjectBuilder:
    """Builds objects with up to `jobs` workers at once; leaving the `with` ends what is not done.

    An object can be begun as soon as its source is in the cache, while others are still being
    planned. Where other processes fill the same cache, each builds what none has begun yet, and
    only then waits for what the others are at.
    """

    def __init__(self, target: Target, cache: Cache, jobs: int) -> None:
        self._target = target
        self._cache = cache
        self._jobs = jobs
        self._threads = ThreadPoolExecutor(max(1, jobs))
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._all: list[Worker] = []
        self._closed = threading.Event()
        self._begun: dict[str, Future[Built | None]] = {}

    def __enter__(self) -> "ObjectBuilder":
        return self

    def __exit__(self, *exc: object) -> None:
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)  # begin nothing more
        for worker in self._all:
            worker.close()
        self._threads.shutdown()

    @property
    def begun(self) -> Set[str]:
        """The objects that were missing when they were begun."""
        return self._begun.keys()

    def start(self) -> None:
        """Starts the workers, so that they are ready when there is something to build.

        Raises UserError if the compilers are not installed.
        """
        while len(self._all) < self._jobs:
            self._idle.put(self._new_worker())

    def begin(self, key: str) -> None:
        """Begins to build an object whose source is in the cache, unless that is done already."""
        if key not in self._begun and self._cache.read_object(key) is None:
            self._begun[key] = self._threads.submit(self._build, key, False)

    def finish(self, keys: Sequence[str], progress: Progress = lambda built: None) -> list[Built]:
        """Waits until all these objects are in the cache; begins what is missing, longest first.

        Raises UserError and CompileError as `Worker.ask`.
        """
        wanted = list(dict.fromkeys(keys))
        for key in sorted(wanted, key=lambda k: -source_size(self._cache, k)):
            self.begin(key)
        results = [
            Built(object_name(self._cache, key), key, True, 0.0)
            for key in wanted
            if key not in self._begun
        ]
        making = [key for key in self._begun if key in set(wanted)]  # in the order of their start
        others = []
        for key in making:
            built = self._begun[key].result()
            if built is None:
                others.append(key)
                continue
            progress(built)
            results.append(built)
        waits = [self._threads.submit(self._build, key, True) for key in others]
        for wait in waits:
            built = wait.result()
            assert built is not None
            progress(built)
            results.append(built)
        return results

    def _build(self, key: str, wait: bool) -> Built | None:
        """Builds one object; None if another process is at it and `wait` is false."""
        name = object_name(self._cache, key)
        with self._cache.lock(key, wait) as mine:
            if not mine:
                return None
            if self._cache.read_object(key) is not None:
                return Built(name, key, True, 0.0)
            worker = self._take()
            what = f"'{name}' ({self._cache.source_folder(key)})"
            try:
                answer = worker.ask({"kind": "object", "key": key}, what)
            except CompileError as error:
                error.key = key
                raise
            self._idle.put(worker)
            return Built(name, key, False, answer["seconds"])

    def _take(self) -> Worker:
        """A worker that is idle, or a new one."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._new_worker()

    def _new_worker(self) -> Worker:
        worker = Worker(self._cache, self._target, loaded=True)
        self._all.append(worker)
        if self._closed.is_set():  # nobody would end it
            worker.close()
        return worker


def object_name(cache: Cache, key: str) -> str:
    """What people call an object: its source's name, or its key if that is gone."""
    try:
        return str(json.loads((cache.source_folder(key) / INDEX).read_text())["name"])
    except (OSError, ValueError, KeyError):
        return key


def source_size(cache: Cache, key: str) -> int:
    """Bytes of an object's MLIR, by which objects are dealt out and ordered; 0 if it is gone."""
    return sum(path.stat().st_size for path in cache.source_folder(key).glob("*.mlir"))
