"""Messages to the user from one rank only."""

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.error_lines import print_error
from buddy_pipeline.ranks.world import detect_launcher


def print_common_error(message: str) -> None:
    """Prints an error that every rank has found by itself, such as a wrong option: rank 0 does."""
    try:
        launcher = detect_launcher()
    except UserError:  # what the environment says of ranks makes no sense
        launcher = None
    if launcher is None or launcher.rank == 0:
        print_error(message)
