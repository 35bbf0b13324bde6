"""What the console script starts, and the first of ours to be imported.

From here on an interrupt ends the process in silence, also while the rest is imported. Python's own
handler would print a traceback, and would wait for MPI_Init to return, which it never does when the
interrupt has ended another rank.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)

from buddy_pipeline.launcher.supervisor import supervise  # noqa: E402  (an interrupt may come now)


def main() -> int:
    """The command line of this process's arguments; its exit code."""
    supervise()
    from buddy_pipeline.launcher.cli import main as command_line

    return command_line()
