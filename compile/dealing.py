"""Dealing: which of the ranks that build together makes which object or weight file, each once."""

from collections.abc import Collection, Sequence


class Dealing:
    """Objects dealt out to ranks, each to one that runs its code, evenly by size."""

    def __init__(self, ranks: Sequence[int], busy: int | None = None) -> None:
        """`busy` is a rank that has other work now: it gets only what nobody else runs."""
        self._load = dict.fromkeys(ranks, 0)
        self._busy = busy
        self.owner: dict[str, int] = {}
        """The rank of each object that was dealt, by key."""

    def deal(self, key: str, size: int, wanting: Collection[int]) -> int | None:
        """The rank that builds an object that `wanting` ranks run, if it was not dealt before."""
        able = [rank for rank in self._load if rank in wanting]
        if key in self.owner or not able:
            return None
        idle = [rank for rank in able if rank != self._busy]
        rank = min(idle or able, key=lambda each: (self._load[each], -each))
        self._load[rank] += size
        self.owner[key] = rank
        return rank
