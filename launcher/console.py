"""Messages to the user from one rank only."""

import sys

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.error_lines import print_error
from buddy_pipeline.ranks.mpi_launcher import detect_launcher


def print_common_error(message: str) -> None:
    """Prints an error that every rank has found by itself, such as a wrong option: rank 0 does."""
    if _is_rank_0():
        print_error(message)


def print_warning(message: str) -> None:
    """Prints what a user should know but need not mend, found by every rank: rank 0 does."""
    if _is_rank_0() and sys.stderr is not None:
        sys.stderr.write(f"buddy-pipeline: warning: {message}\n")


def _is_rank_0() -> bool:
    try:
        launcher = detect_launcher()
    except UserError:  # what the environment says of ranks makes no sense
        return True
    return launcher is None or launcher.rank == 0
