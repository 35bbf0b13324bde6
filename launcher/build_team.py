"""The ranks that build one directory together: who they are, and what they tell each other.

Under `mpirun` the ranks that see the same build directory, and build for the same CPU, are a team:
one of them, the leader, exports the model and writes what there is one of; all build objects and
pack weights, each some of them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from buddy_pipeline.compile.build_directory import BuildDirectory, target_folder
from buddy_pipeline.compile.cache import Cache
from buddy_pipeline.compile.target import Target
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.exchange import all_gather, receive_record, send_record
from buddy_pipeline.ranks.faults import exit_alone, guarded, together
from buddy_pipeline.ranks.mpi_launcher import detect_launcher
from buddy_pipeline.ranks.world import World, join_world

_T = TypeVar("_T")
_TAG = 7


@dataclass(frozen=True)
class BuildTeam:
    """One rank's view of its team."""

    world: World
    ranks: tuple[int, ...]
    """The members, ascending; the first is the leader."""
    neighbours: tuple[int, ...]
    """Those that share the leader's cache, the leader among them."""

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.world.rank == self.ranks[0]

    @property
    def others(self) -> tuple[int, ...]:
        """All but the leader."""
        return self.ranks[1:]

    def tell(self, rank: int, what: object) -> None:
        """Sends a small record to another member."""
        send_record(self.world.comm, what, rank, _TAG)

    def hear(self, kind: type[_T], rank: int | None = None) -> _T:
        """What another member, by default the leader, told this one next.

        Waits by polling: the core is for those that compile.
        """
        source = self.ranks[0] if rank is None else rank
        return receive_record(self.world.comm, kind, source, _TAG)

    def gather(self, what: _T, kind: type[_T]) -> list[_T]:
        """On the leader what every member has, by place in `ranks`; nothing on the others."""
        if self.leads:
            return [what, *(self.hear(kind, rank) for rank in self.others)]
        self.tell(self.ranks[0], what)
        return []

    def share(self, make: Callable[[], _T], kind: type[_T]) -> _T | None:
        """What the leader makes, on every member; None on the others where it fails."""
        if not self.leads:
            return self.hear(kind | None)  # type: ignore[arg-type]
        made = None
        try:
            made = make()
        finally:
            for rank in self.others:
                self.tell(rank, made)
        return made


@contextmanager
def build_world(purpose: str, rank: int | None = None) -> Iterator[World]:
    """The ranks that `mpirun` started, or this process alone where it builds for a `rank`.

    purpose: the command; UserError if it is not the same on all ranks.

    Among several ranks whatever goes wrong on one ends all.
    """
    try:
        world = join_world(purpose=purpose) if rank is None else join_world({})
    except UserError as error:
        if detect_launcher() is None:
            raise
        exit_alone(error)
    with nullcontext() if world.comm is None else guarded(world):
        yield world


def team_folder(world: World, root: Path, target: Target) -> Path:
    """Where this rank builds: in `root`, or where ranks have different CPUs in a folder of it for
    each."""
    if world.comm is None or len(set(all_gather(world.comm, target.digest(), str))) == 1:
        return root
    return root / target_folder(target)


def alone(world: World) -> BuildTeam:
    """The team of a process that builds by itself."""
    return BuildTeam(world, (world.rank,), (world.rank,))


def form_team(world: World, directory: BuildDirectory, cache: Cache, purpose: str) -> BuildTeam:
    """The team of this rank; every rank calls this.

    purpose: equal on the ranks that build the same; UserError if others build something else in the
    same directory, or if it cannot be written.

    Files tell who sees the same folder, since a path may lead to another one on each host: the
    first rank of each host leaves one, and the others look for it.
    """
    if world.comm is None:
        return alone(world)
    mine = _Place(world.hostname, str(directory.root.absolute()), purpose, secrets.token_hex(8))
    places = all_gather(world.comm, mine, _Place)
    first = [place.where for place in places].index(mine.where)
    token = f".team-{mine.token}"
    left = [directory.root / token, cache.root / token] if first == world.rank else []

    def leave() -> None:
        if left:
            directory.create()
            directory.write(left[0], b"")
            cache.write(left[1], b"")

    try:
        together(world, leave)
        seen = tuple(_seen(places, folder, world.rank) for folder in (directory.root, cache.root))
        views = all_gather(world.comm, seen, tuple[int, ...])
    finally:
        for path in left:
            with suppress(OSError):  # it may be that which failed
                path.unlink()
    ranks = tuple(rank for rank, (found, _) in enumerate(views) if found == seen[0])
    together(world, lambda: _check_purpose(directory, ranks, places))
    caches = {rank: found for rank, (_, found) in enumerate(views)}
    return BuildTeam(world, ranks, tuple(r for r in ranks if caches[r] == caches[ranks[0]]))


@dataclass(frozen=True)
class _Place:
    """Where a rank builds, and what."""

    hostname: str
    directory: str
    purpose: str
    token: str
    """Part of the name of the file that it leaves, if it is the first there."""

    @property
    def where(self) -> tuple[str, str]:
        """Ranks of one place see the same folder."""
        return self.hostname, self.directory


def _seen(places: Sequence[_Place], folder: Path, default: int) -> int:
    """The lowest of the ranks whose file is in the folder; `default` if there is none."""
    found = (r for r, place in enumerate(places) if (folder / f".team-{place.token}").exists())
    return next(found, default)


def _check_purpose(
    directory: BuildDirectory, ranks: Sequence[int], places: Sequence[_Place]
) -> None:
    for rank in ranks:
        if places[rank].purpose != places[ranks[0]].purpose:
            raise UserError(
                f"ranks {ranks[0]} and {rank} build different things in '{directory.root}': give"
                " them the same options, or each its own --build-dir"
            )
