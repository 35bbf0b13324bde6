"""The program that tests start on every rank: prints the ranks' clock offsets as JSON."""

import json
import sys

from buddy_pipeline.ranks.exchange import gather
from buddy_pipeline.ranks.faults import CollectiveExit, guarded
from buddy_pipeline.ranks.profile_clock import Offset, estimate_offset
from buddy_pipeline.ranks.world import join_world


def main() -> None:
    world = join_world()
    with guarded(world):
        offset = estimate_offset(world)
        offsets = [offset] if world.comm is None else gather(world.comm, offset, Offset)
        if world.rank == 0:
            print(json.dumps(offsets), flush=True)


if __name__ == "__main__":
    try:
        main()
    except CollectiveExit as leaving:
        sys.exit(leaving.code)
