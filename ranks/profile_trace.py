"""The profile of all ranks as a trace that chrome://tracing and ui.perfetto.dev open.

Format: "Trace Event Format", JSON object form, described in the catapult project on GitHub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from buddy_pipeline.ranks.profile_regions import Region
from buddy_pipeline.ranks.profile_report import RankProfile

#: The track of what the rank's own thread does; the team's threads follow.
_STEPS_TRACK = 0


def write_trace(path: Path, profiles: Sequence[RankProfile]) -> None:
    """Writes every rank as a process: its steps on one track, its regions on one a thread.

    The times of a trace begin at 0: `otherData.start_ns` is what rank 0's `time.perf_counter_ns`
    showed then.
    """
    start = min(p.on_common_clock(p.begin) for p in profiles)
    with path.open("w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {{"start_ns": {start}}}, ')
        file.write('"traceEvents": [\n')
        separator = ""
        for profile in profiles:
            for event in _events(profile, start):
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")


def _events(profile: RankProfile, start: float) -> Iterator[dict[str, Any]]:
    rank = profile.rank

    def event(track: int, name: str, category: str, begin: float, end: float) -> dict[str, Any]:
        return {
            "name": name,
            "cat": category,
            "ph": "X",  # a complete event
            "pid": rank,
            "tid": track,
            "ts": round((profile.on_common_clock(begin) - start) / 1e3, 3),  # µs
            "dur": round((end - begin) / 1e3, 3),
        }

    yield _label(rank, _STEPS_TRACK, "process_name", f"rank {rank} on {profile.hostname}")
    yield _label(rank, _STEPS_TRACK, "thread_name", "steps")
    for span in profile.spans:
        yield event(_STEPS_TRACK, span.kind.name.lower(), "step", span.begin, span.end)
    stage = profile.stage
    if stage is None or not stage.traced:
        return
    for thread in range(profile.threads):
        yield _label(rank, 1 + thread, "thread_name", f"thread {thread}")
    regions = [each.region for each in stage.regions]
    for step in stage.traced:
        for thread, times in enumerate(step.times.tolist()):
            for region, (begin, arrival, end) in zip(regions, times, strict=False):
                yield event(1 + thread, _name(region), "region", begin, arrival)
                yield event(1 + thread, "barrier", "wait", arrival, end)


def _name(region: Region) -> str:
    return f"{region.partition}: {region.name}"


def _label(rank: int, track: int, kind: str, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}
