"""The profile of all ranks as numbers and as text: who was busy when, and where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from buddy_pipeline.partition.counted import counted
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


def by_template(regions: Sequence[RegionTimes]) -> dict[str, RegionTimes]:
    """The times by what people call a region; those of layers that share code are summed.

    In the order of the first of each.
    """
    groups: dict[tuple[str, int], list[RegionTimes]] = {}
    numbers = Counter[str]()  # regions of each partition so far
    for each in regions:
        number = numbers[each.region.partition]
        numbers[each.region.partition] += 1
        groups.setdefault((each.region.template, number), []).append(each)
    return {_name(group): _sum(group) for group in groups.values()}


def _name(group: Sequence[RegionTimes]) -> str:
    first, last = group[0].region, group[-1].region
    if not first.partition:
        return first.name
    place = first.partition if first is last else f"layers {first.unit} to {last.unit}"
    return f"{place}: {first.name}"


def _sum(group: Sequence[RegionTimes]) -> RegionTimes:
    return replace(
        group[0],
        calls=sum(each.calls for each in group),
        wall=sum(each.wall for each in group),
        gap_before=sum(each.gap_before for each in group),
        gap_after=sum(each.gap_after for each in group),
        waits=sum(each.waits for each in group),
        first_waits=sum(each.first_waits for each in group),
    )


def report(profiles: Sequence[RankProfile], slots: int) -> Iterator[str]:
    """The lines that are printed at exit: a table for each rank, then who was busy."""
    for profile in profiles:
        yield ""
        yield from _rank_lines(profile)
        if profile.stage is not None:
            run = profile.totals[Kind.RUN]
            yield from _stage_lines(profile.stage, profile.threads, slots, run)
    busy = busy_shares(profiles)
    if busy is not None:
        shares = ", ".join(f"rank {r} {100 * s:.1f} %" for r, s in enumerate(busy.shares))
        seconds = (busy.end - busy.begin) / 1e9
        yield ""
        yield f"busy over {seconds:.3f} s: {shares}; bubble {100 * busy.bubble:.1f} %"


def _rank_lines(profile: RankProfile) -> Iterator[str]:
    steps = profile.counts[Kind.RUN]
    whole = max(1, profile.end - profile.begin)
    threads = counted(profile.threads, "thread")
    clock = ""
    if profile.rank:
        clock = f", clock {profile.clock.ns / 1e3:+.1f} µs ± {profile.clock.error / 1e3:.1f}"
    yield (
        f"profile of rank {profile.rank} on {profile.hostname}, {threads}: "
        f"{counted(steps, 'step')} in {whole / 1e9:.3f} s{clock}"
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


def _stage_lines(stage: StageTimes, threads: int, slots: int, run: int) -> Iterator[str]:
    if not stage.regions:
        return
    columns = ("calls", "wall ms", "%", "gap before", "gap after", "waits", "of thread 0")
    heads = "".join(f"{column:>12}" for column in columns)
    yield f"  {'parallel region':44}{heads}"
    for name, each in by_template(stage.regions).items():
        numbers = (each.wall, each.gap_before, each.gap_after, each.waits, each.first_waits)
        wall, *others = (f"{number / 1e6:12,.3f}" for number in numbers)
        share = f"{100 * each.wall / stage.span:12.1f}" if stage.span else f"{'-':>12}"
        yield f"  {name:44}{each.calls:12,}{wall}{share}{''.join(others)}"
    totals = {
        "first region to last": stage.span,
        "in regions": stage.in_regions,
        "between regions": stage.between_regions,
        "before and after": run - stage.span,
        f"waiting, {counted(threads, 'thread')}": stage.waits,
        "waiting, thread 0": stage.first_waits,
    }
    yield "  " + ", ".join(f"{name} {ns / 1e6:,.3f} ms" for name, ns in totals.items())
    if stage.without_slot:
        yield (
            f"  warning: {stage.without_slot} regions of a step are beyond the table's {slots} "
            f"slots and counted as other: set {SLOTS_VARIABLE}={slots + stage.without_slot}"
        )


SLOTS_VARIABLE = "BUDDY_PIPELINE_PROFILE_SLOTS"
"""Environment variable: regions of a step that are counted apart."""
