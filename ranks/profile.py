"""The profile of a job: asked for by environment or option, kept by each rank, shown by rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.engine import Engine
from buddy_pipeline.ranks.exchange import gather
from buddy_pipeline.ranks.profile_clock import estimate_offset
from buddy_pipeline.ranks.profile_picture import write_picture
from buddy_pipeline.ranks.profile_report import SLOTS_VARIABLE, RankProfile, report
from buddy_pipeline.ranks.profile_spans import Kind, Spans
from buddy_pipeline.ranks.profile_trace import write_trace
from buddy_pipeline.ranks.sequence import Sequence
from buddy_pipeline.ranks.stage import Stage
from buddy_pipeline.ranks.transport import Loopback, Transport
from buddy_pipeline.ranks.world import World

SWITCH = "BUDDY_PIPELINE_PROFILE"
"""Environment variable: 1 profiles the job."""
_DEFAULT_SLOTS = 4096
_TRACE, _PICTURE = "trace.json", "timeline.svg"


@dataclass(frozen=True)
class ProfileSettings:
    """How to profile."""

    slots: int
    """Regions of a step that are counted apart."""
    folder: Path | None
    """Where trace and picture go; None prints the tables only."""


def profile_settings(
    folder: Path | None, environ: Mapping[str, str] = os.environ
) -> ProfileSettings | None:
    """What `--profile-out` and the environment ask for; None if there is to be no profile.

    Raises UserError for a variable with a value that it cannot have.
    """
    switch = environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise UserError(f"environment variable {SWITCH} is {switch!r}: use 1 for a profile, or 0")
    slots = environ.get(SLOTS_VARIABLE, str(_DEFAULT_SLOTS))
    if not (slots.isascii() and slots.isdigit() and int(slots) > 0):
        raise UserError(
            f"environment variable {SLOTS_VARIABLE} is {slots!r}: use a whole number of 1 or more"
        )
    if folder is None and switch != "1":
        return None
    return ProfileSettings(int(slots), folder)


def check_folder(folder: Path) -> None:
    """Makes the folder that trace and picture will go to; UserError if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--profile-out {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--profile-out {folder} cannot be written: give another folder")


class Profiler:
    """One rank's recording, from when the ring stands to the end of the job.

    Every rank must make one and call `finish`: both exchange messages.
    """

    def __init__(
        self,
        world: World,
        stage: Stage,
        ring: Transport | Loopback,
        engine: Engine | None,
        settings: ProfileSettings,
    ) -> None:
        self._world = world
        self._settings = settings
        self._clock = estimate_offset(world)
        self._threads = stage.threads
        self._regions = None if stage.is_empty else stage.profile(settings.slots)
        self._spans = Spans()
        keep = None if self._regions is None else self._regions.keep_step
        self._spans.watch(stage, "run", Kind.RUN, after=keep)
        self._spans.watch(ring, "receive", Kind.RECEIVE)
        for method in ("begin", "send"):
            self._spans.watch(ring, method, Kind.SEND)
        if isinstance(ring, Transport):
            for method in ("carry_on", "forward"):
                self._spans.watch(ring, method, Kind.SEND)

        if engine is not None:
            self._watch_sampling(engine)

    def _watch_sampling(self, engine: Engine) -> None:
        """Has the sampler of every sequence that the engine gets recorded."""
        submit = engine.submit

        def watched(sequence: Sequence) -> None:
            sequence.choose = self._spans.timed(Kind.SAMPLE, sequence.choose)
            submit(sequence)

        engine.submit = watched  # type: ignore[method-assign]

    def finish(self) -> None:
        """Ends the recording; rank 0 prints all ranks' tables and writes the files.

        Raises UserError on rank 0 if a file cannot be written.
        """
        profiles = self._gather(self._mine())
        if self._world.rank != 0:
            return
        print(*report(profiles, self._settings.slots), sep="\n", file=sys.stderr)
        folder = self._settings.folder
        if folder is None:
            return
        try:
            write_trace(folder / _TRACE, profiles)
            write_picture(folder / _PICTURE, profiles)
        except OSError as error:
            raise UserError(f"--profile-out {folder} cannot be written: {error.strerror}") from None

    def _mine(self) -> RankProfile:
        spans = self._spans
        return RankProfile(
            rank=self._world.rank,
            hostname=self._world.hostname,
            threads=self._threads,
            clock=self._clock,
            begin=spans.begin,
            end=spans.end,
            totals=tuple(spans.totals),
            counts=tuple(spans.counts),
            spans=tuple(spans.kept),
            stage=None if self._regions is None else self._regions.read(),
        )

    def _gather(self, mine: RankProfile) -> list[RankProfile]:
        """All ranks' profiles on rank 0, only its own elsewhere."""
        if self._world.comm is None:
            return [mine]
        return gather(self._world.comm, mine, RankProfile) or [mine]
