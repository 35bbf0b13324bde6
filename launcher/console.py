"""Messages to the user, one line each, from one rank only."""

import sys

from buddy_pipeline.ranks.world import detect_launcher


def print_error(message: str) -> None:
    """Prints an error that every rank has found by itself, such as a wrong option: rank 0 does."""
    launcher = detect_launcher()
    if launcher is None or launcher.rank == 0:
        print(f"buddy-pipeline: error: {' '.join(message.split())}", file=sys.stderr)
