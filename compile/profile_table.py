"""The table in which compiled code counts, for one thread, what the team does between barriers.

It is a head and slots, each of `PROFILE_SLOT_WORDS` words of 8 bytes; a region's slot is its place
in the step, and slot 0 stands for what is before the first region. Times are in ticks.
"""

from enum import Enum

PROFILE_SLOT_WORDS = 8


class ProfileWord(Enum):
    """Index of each word of the head."""

    CURSOR = 0  # slot of the region that runs now
    BEGIN = 1  # when this step's first call began
    START = 2  # when the region that runs now began
    END = 3  # when the region before it ended
    SPAN = 4  # from BEGIN to the last region's end, summed over steps
    STEPS = 5


class SlotWord(Enum):
    """Index of each word of a slot."""

    CALLS = 0
    WORK = 1  # from a region's start to its barrier
    WAIT = 2  # in the barrier
    GAP_BEFORE = 3
    GAP_AFTER = 4
    START = 5  # of the last call
    ARRIVAL = 6  # at the barrier, of the last call
    END = 7  # of the last call
