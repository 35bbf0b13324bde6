"""The profile of all ranks as numbers and as text: who was busy when, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from buddy_pipeline.ranks.profile_clock import Offset
from buddy_pipeline.ranks.profile_regions import RegionTimes, StageTimes
from buddy_pipeline.ranks.profile_spans import KEPT_SPANS, Kind, Span


@dataclass(frozen=True)
class RankProfile:
    """What one rank recorded, on its own clock."""

    rank: int
    hostname: str
    threads: int
    clock: Offset
    begin: int
    end: int
    """The time that it recorded, ns."""
    totals: tuple[int, ...]
    """ns by `Kind`"""
    counts: tuple[int, ...]
    """calls by `Kind`"""
    spans: tuple[Span, ...]
    """The latest `KEPT_SPANS`."""
    stage: StageTimes | None
    """None for a rank that only passes messages on."""

    @property
    def python(self) -> int:
        """ns that are in no span."""
        return self.end - self.begin - sum(self.totals)

    def on_common_clock(self, moment: float) -> float:
        """A moment of this rank's clock as rank 0's shows it, ns."""
        return moment - self.clock.ns


@dataclass(frozen=True)
class Busy:
    """How busy the ranks were from the first block that ran to the end of the last."""

    begin: float
    end: float
    """ns on the common clock"""
    shares: tuple[float, ...]
    """By rank: running its block."""

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they ran nothing."""
        return 1 - sum(self.shares) / len(self.shares)


def busy_shares(profiles: Sequence[RankProfile]) -> Busy | None:
    """Busy shares and bubble, by rank; None if nothing ran.

    Looks at the time that all ranks have single spans of: the whole job, if it was not too long.
    """
    runs = [
        [
            (p.on_common_clock(s.begin), p.on_common_clock(s.end))
            for s in p.spans
            if s.kind is Kind.RUN
        ]
        for p in profiles
    ]
    if not any(runs):
        return None
    begin = min(run[0][0] for run in runs if run)
    for profile in profiles:
        if len(profile.spans) == KEPT_SPANS:
            begin = max(begin, profile.on_common_clock(profile.spans[0].begin))
    end = max(run[-1][1] for run in runs if run)
    shares = (sum(max(0.0, e - max(b, begin)) for b, e in run) / (end - begin) for run in runs)
    return Busy(begin, end, tuple(shares))


def by_template(regions: Sequence[RegionTimes]) -> list[RegionTimes]:
    """Regions of partitions that share a template summed, in the order of the first."""
    sums: dict[tuple[str, int], RegionTimes] = {}
    numbers: dict[str, int] = {}
    for each in regions:
        partition = each.region.partition
        number = numbers.get(partition, 0)
        numbers[partition] = number + 1
        key = (each.region.template, number)
        before = sums.get(key)
        if before is None:
            sums[key] = each
            continue
        sums[key] = replace(
            before,
            calls=before.calls + each.calls,
            wall=before.wall + each.wall,
            gap_before=before.gap_before + each.gap_before,
            gap_after=before.gap_after + each.gap_after,
            waits=before.waits + each.waits,
            first_waits=before.first_waits + each.first_waits,
        )
    return list(sums.values())


def report(profiles: Sequence[RankProfile], slots: int) -> Iterator[str]:
    """The lines that are printed at exit: a table for each rank, then who was busy."""
    for profile in profiles:
        yield ""
        yield from _rank_lines(profile)
        if profile.stage is not None:
            yield from _stage_lines(profile.stage, profile.threads, slots)
    busy = busy_shares(profiles)
    if busy is not None:
        shares = ", ".join(f"rank {r} {100 * s:.1f} %" for r, s in enumerate(busy.shares))
        seconds = (busy.end - busy.begin) / 1e9
        yield ""
        yield f"busy over {seconds:.3f} s: {shares}; bubble {100 * busy.bubble:.1f} %"


def _rank_lines(profile: RankProfile) -> Iterator[str]:
    steps = profile.counts[Kind.RUN]
    whole = max(1, profile.end - profile.begin)
    threads = f"{profile.threads} thread{'s' * (profile.threads > 1)}"
    clock = ""
    if profile.rank:
        clock = f", clock {profile.clock.ns / 1e3:+.1f} µs ± {profile.clock.error / 1e3:.1f}"
    yield (
        f"profile of rank {profile.rank} on {profile.hostname}, {threads}: "
        f"{steps} steps in {whole / 1e9:.3f} s{clock}"
    )
    parts = [(_SHOWN[kind], profile.totals[kind]) for kind in Kind] + [("Python", profile.python)]
    yield f"  {'':14}{'ms':>12}{'% of time':>11}{'µs a step':>12}"
    for name, total in parts:
        per_step = f"{total / 1e3 / steps:12,.1f}" if steps else f"{'-':>12}"
        yield f"  {name:14}{total / 1e6:12,.3f}{100 * total / whole:11.1f}{per_step}"


_SHOWN = {
    Kind.RECEIVE: "receive wait",
    Kind.RUN: "run",
    Kind.SEND: "send",
    Kind.SAMPLE: "sample",
}


def _stage_lines(stage: StageTimes, threads: int, slots: int) -> Iterator[str]:
    if not stage.regions:
        return
    columns = ("calls", "wall ms", "%", "gap before", "gap after", "waits", "of thread 0")
    heads = "".join(f"{column:>12}" for column in columns)
    yield f"  {'parallel region':34}{heads}"
    for each in by_template(stage.regions):
        numbers = (each.wall, each.gap_before, each.gap_after, each.waits, each.first_waits)
        wall, *others = (f"{number / 1e6:12,.3f}" for number in numbers)
        share = f"{100 * each.wall / stage.span:12.1f}" if stage.span else f"{'-':>12}"
        yield f"  {_region_name(each):34}{each.calls:12,}{wall}{share}{''.join(others)}"
    totals = {
        "first region to last": stage.span,
        "in regions": stage.in_regions,
        "between regions": stage.between_regions,
        f"waiting, {threads} threads": stage.waits,
        "waiting, thread 0": stage.first_waits,
    }
    yield "  " + ", ".join(f"{name} {ns / 1e6:,.3f} ms" for name, ns in totals.items())
    if stage.without_slot:
        yield (
            f"  warning: {stage.without_slot} regions of a step are beyond the table's {slots} "
            f"slots and counted as other: set {SLOTS_VARIABLE}={slots + stage.without_slot}"
        )


def _region_name(each: RegionTimes) -> str:
    partition = each.region.partition
    return f"{partition}: {each.region.name}" if partition else each.region.name


SLOTS_VARIABLE = "BUDDY_PIPELINE_PROFILE_SLOTS"
"""Environment variable: regions of a step that are counted apart."""
