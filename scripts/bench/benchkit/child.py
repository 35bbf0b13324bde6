"""An object that lives in a process of its own, so that its threads, memory and faults stay there.

A team of threads is chosen when a process loads its OpenMP runtime; so one contestant with one team
size is one process, and several can be asked in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

_lives_here: Any = None
"""In the child: the object that requests are for."""


class Child:
    """A process that holds `make(*args)`; both must be picklable."""

    def __init__(self, name: str, make: Callable[..., Any], *args: Any) -> None:
        self._name = name
        # spawn: a forked child would share the parent's half of libraries that have threads.
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))
        self._ask(_make, make, args)

    def call(self, method: str, *args: Any) -> Any:
        """What the object's method returns. Raises what it raises, and RuntimeError if the process
        has died."""
        return self._ask(_call, method, args)

    def close(self) -> None:
        """Ends the process."""
        self._pool.shutdown()

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return self._pool.submit(function, *args).result()
        except BrokenProcessPool as error:
            raise RuntimeError(f"the process of {self._name} died") from error


@contextlib.contextmanager
def child(name: str, make: Callable[..., Any], *args: Any) -> Iterator[Child]:
    """A `Child` that ends with the block."""
    process = Child(name, make, *args)
    try:
        yield process
    finally:
        process.close()


def run_in_child(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns in a process that lives for this call."""
    with child(name, _Nothing) as process:
        return process.call("run", function, args)


class _Nothing:
    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(*args)


def _make(make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _lives_here
    _lives_here = make(*args)


def _call(method: str, args: tuple[Any, ...]) -> Any:
    return getattr(_lives_here, method)(*args)
