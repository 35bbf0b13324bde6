"""A compile worker seen from outside: one child process that is asked and answers."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.versions import installed
from buddy_pipeline.partition.errors import UserError

#: Seconds that one request may take; a pass that does not end is an error, not a hang.
TIME_LIMIT = 600.0


class CompileError(Exception):
    """The compiler failed on something that is not the user's mistake; one line, names the
    fragment and where its MLIR is.

    `key` is the object's, where it was one that failed.
    """

    key: str | None = None


class Worker:
    """One worker process, kept warm between requests; see `compile.worker` for what it takes."""

    def __init__(self, cache: Cache, target: Target, *, loaded: bool = False) -> None:
        """Starts the process; `loaded` has it load what building objects needs at once.

        Raises UserError if the compilers are not installed.
        """
        _require_compilers()
        self._common = {"cache": str(cache.root), "target": asdict(target)}
        # A worker must not take itself for a rank of the job that started it.
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "PMIX_", "OMPI_"))
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "buddy_pipeline.compile.worker", *(["loaded"] * loaded)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()  # "" when there are no more
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=read, daemon=True)
            for read in (self._collect_answers, self._collect_errors)
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process, whatever it is at."""
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that it never read
                    stream.close()

    def _collect_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _collect_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors.append(line.rstrip())
            del self._errors[:-50]

    def ask(
        self,
        request: dict[str, Any],
        what: str,
        note: Callable[[dict[str, Any]], None] = lambda noted: None,
    ) -> dict[str, Any]:
        """Sends a request and waits for its answer; `note` gets what the worker says before.

        Raises UserError for what the worker calls one, and CompileError, which names `what` was
        asked for, when it fails, dies or takes too long.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: there is no answer
            self._process.stdin.write(json.dumps({**self._common, **request}) + "\n")
            self._process.stdin.flush()
        answer = self._next(what)
        while "note" in answer:
            note(answer["note"])
            answer = self._next(what)
        if "user_error" in answer:
            raise UserError(answer["user_error"])
        if not answer["ok"]:
            message = answer["error"].replace("\n", " ")
            raise CompileError(f"compiling {what} failed: {message}")
        return answer

    def _next(self, what: str) -> dict[str, Any]:
        """What the worker says next."""
        try:
            line = self._answers.get(timeout=TIME_LIMIT)
        except queue.Empty:
            raise CompileError(f"compiling {what} took more than {TIME_LIMIT:.0f} s") from None
        if not line:
            status = self._process.wait()
            self._readers[1].join()
            last = next((text for text in reversed(self._errors) if text.strip()), "no output")
            raise CompileError(
                f"the compiler died (status {status}) while compiling {what}; its last line: {last}"
            )
        said: dict[str, Any] = json.loads(line)
        return said


def _require_compilers() -> None:
    missing = [p for p in ("torch", "torch-mlir", "xtc-mlir-python-bindings") if not installed(p)]
    if missing:
        raise UserError(
            f"the model is not compiled yet and {', '.join(missing)} is not installed; "
            "install buddy-pipeline[compile], or give a filled --cache-dir"
        )
