"""Profiles of ranks with outcomes that a test can write down."""

import numpy as np

from buddy_pipeline.ranks.profile_clock import Offset
from buddy_pipeline.ranks.profile_regions import Region, RegionTimes, StageTimes, TracedStep
from buddy_pipeline.ranks.profile_report import RankProfile
from buddy_pipeline.ranks.profile_spans import Kind, Span

MS = 1_000_000  # ns


def stage_times(layers: int = 2, without_slot: int = 0) -> StageTimes:
    """Two regions a layer, each called once; every region takes 1 ms, of which 0.25 ms waiting."""
    regions = tuple(
        RegionTimes(Region(str(layer), f"layer{layer}", "t", name), 1, MS, 0, 0, MS / 2, MS / 4)
        for layer in range(layers)
        for name in ("linear up_proj", "island 0")
    )
    traced = np.arange(len(regions) * 3, dtype=np.float64).reshape(1, -1, 3) * MS / 3
    return StageTimes(1, len(regions) * MS, regions, without_slot, (TracedStep(traced),))


def rank_profile(
    rank: int, spans: list[Span], ahead: float = 0.0, stage: StageTimes | None = None
) -> RankProfile:
    """A rank whose clock is `ahead` ns ahead of rank 0's, on which `spans` are given."""
    totals = [sum(s.end - s.begin for s in spans if s.kind is kind) for kind in Kind]
    return RankProfile(
        rank=rank,
        hostname="node<1>",
        threads=1,
        clock=Offset(ahead, 1_000.0),
        begin=min((s.begin for s in spans), default=0),
        end=max((s.end for s in spans), default=0),
        totals=tuple(totals),
        counts=tuple(sum(s.kind is kind for s in spans) for kind in Kind),
        spans=tuple(spans),
        stage=stage,
    )


def two_ranks() -> list[RankProfile]:
    """Rank 1, whose clock is 100 ms ahead, runs in ms 0 to 2 and 4 to 6; rank 0 in 2 to 4."""
    first = [Span(Kind.RUN, 100 * MS, 102 * MS), Span(Kind.RUN, 104 * MS, 106 * MS)]
    last = [
        Span(Kind.RECEIVE, 0, 2 * MS),
        Span(Kind.RUN, 2 * MS, 4 * MS),
        Span(Kind.SAMPLE, 4 * MS, 5 * MS),
    ]
    return [rank_profile(0, last, stage=stage_times()), rank_profile(1, first, 100.0 * MS)]
