"""What the user sees of an error: one line on standard error with one prefix, and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback

from buddy_pipeline.partition.errors import UserError

USER_ERROR = 2
"""Exit code for what the user can mend."""
FAILURE = 1
"""Exit code for everything else."""
SIGNAL_BASE = 128
"""Added to the number of the signal that ended a process: its exit code, as shells have it."""

TRACEBACK_VARIABLE = "BUDDY_PIPELINE_TRACEBACK"
"""Environment variable that, when not empty, has `describe` print the traceback as well."""


def print_error(text: str) -> None:
    """Print `text` as one line behind the prefix of all our errors."""
    if sys.stderr is None:  # closed by whoever started this process
        return
    # One write: the lines of several ranks meet in one pipe and must not mix.
    sys.stderr.write(f"buddy-pipeline: error: {' '.join(text.split())}\n")
    sys.stderr.flush()


def describe(error: BaseException, *, show_traceback: bool = False) -> tuple[str, int]:
    """The message of an error that ends the program, and the exit code it ends with.

    A UserError speaks for itself; any other error is named by its type. The message is empty for
    an output that nobody reads any more, which ends the program as SIGPIPE would.
    """
    if isinstance(error, BrokenPipeError):
        _discard_output()
        return "", SIGNAL_BASE + signal.SIGPIPE
    if isinstance(error, UserError):
        return str(error), USER_ERROR
    if show_traceback or os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    name, text = type(error).__name__, str(error)
    return f"{name}: {text}" if text else name, FAILURE


def _discard_output() -> None:
    # The interpreter flushes at its end and would complain about the pipe once more; see the note
    # on SIGPIPE in the documentation of Python's signal module.
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
