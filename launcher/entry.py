"""What the console script starts, and the first of ours to be imported.

From here on an interrupt ends the process in silence, also while the rest is imported. Python's own
handler would print a traceback, and would wait for MPI_Init to return, which it never does when the
interrupt has ended another rank.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)

from buddy_pipeline.launcher.cli import main  # noqa: E402  (only now an interrupt may come)

__all__ = ["main"]
