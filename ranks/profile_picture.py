"""The profile of all ranks as a picture: what each did over the job, and a few steps close up.

Format: "Scalable Vector Graphics (SVG) 2", w3.org/TR/SVG2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from buddy_pipeline.partition.counted import counted
from buddy_pipeline.ranks.profile_report import Busy, RankProfile, busy_shares
from buddy_pipeline.ranks.profile_spans import Kind

_WIDTH, _LEFT, _RIGHT = 1200, 130, 110
_LANE, _GAP = 34, 10
_PLOT = _WIDTH - _LEFT - _RIGHT
#: Pieces of the time in the overview, two pixels wide.
_BINS = _PLOT // 2
_CLOSE_UP_STEPS = 8
_FAINT = 0.05  # pixels
#: In the order of a stack from the bottom, the wait as the ground behind it; hues that people who
#: see no red or green tell apart.
_COLOURS: dict[Kind | None, str] = {
    Kind.RUN: "#1f6fb4",
    Kind.SEND: "#e8a33d",
    Kind.SAMPLE: "#8a4fa3",
    None: "#b5443c",
    Kind.RECEIVE: "#dfe3e8",
}
_NAMES: dict[Kind | None, str] = {
    Kind.RUN: "run",
    Kind.SEND: "send",
    Kind.SAMPLE: "sample",
    None: "Python",
    Kind.RECEIVE: "receive wait",
}


def write_picture(path: Path, profiles: Sequence[RankProfile]) -> None:
    """Writes the timeline, or a note that nothing ran."""
    busy = busy_shares(profiles)
    if busy is None:
        lines = ["<text x='20' y='40'>no rank ran a step</text>"]
        height = 60
    else:
        height = 190 + 2 * len(profiles) * (_LANE + _GAP)
        lines = list(_picture(profiles, busy))
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{height}' "
        f"viewBox='0 0 {_WIDTH} {height}' font-family='sans-serif' font-size='13'>"
    )
    paper = f"<rect width='{_WIDTH}' height='{height}' fill='white'/>"
    path.write_text("\n".join([head, paper, *lines, "</svg>", ""]), encoding="utf-8")


def _picture(profiles: Sequence[RankProfile], busy: Busy) -> Iterator[str]:
    seconds = (busy.end - busy.begin) / 1e9
    ranks = counted(len(profiles), "rank")
    title = f"{ranks} over {seconds:.3f} s: bubble {100 * busy.bubble:.1f} %"
    yield f"<text x='{_LEFT}' y='28' font-size='18'>{title}</text>"
    yield from _legend()
    top = 85
    for profile, share in zip(profiles, busy.shares, strict=True):
        yield from _lane_frame(profile, top)
        yield _text(_LEFT + _PLOT + 10, top + 22, f"{100 * share:.1f} % busy")
        yield from _stacks(profile, busy.begin, busy.end, top)
        top += _LANE + _GAP
    yield from _axis(top, (busy.end - busy.begin) / 1e6)
    top += 55
    begin, end = _close_up(profiles, busy)
    yield _text(_LEFT, top - 12, f"from {(begin - busy.begin) / 1e6:.3f} ms on, close up")
    for profile in profiles:
        yield from _lane_frame(profile, top)
        yield from _spans(profile, begin, end, top)
        top += _LANE + _GAP
    yield from _axis(top, (end - begin) / 1e6)


def _legend() -> Iterator[str]:
    x = _LEFT
    for kind, colour in _COLOURS.items():
        yield _rect(x, 44, 14, 14, colour)
        yield _text(x + 20, 56, _NAMES[kind])
        x += 40 + 8 * len(_NAMES[kind])


def _lane_frame(profile: RankProfile, top: float) -> Iterator[str]:
    yield _text(20, top + 15, f"rank {profile.rank}")
    yield _text(20, top + 30, profile.hostname[:14], "#777777")


def _stacks(profile: RankProfile, begin: float, end: float, top: float) -> Iterator[str]:
    """For each short piece of the time the shares of what was done, one above the other."""
    yield _rect(_LEFT, top, _PLOT, _LANE, _COLOURS[Kind.RECEIVE])
    spans = _binned(profile, begin, end)
    stack = (Kind.RUN, Kind.SEND, Kind.SAMPLE)
    shares_of: dict[Kind | None, np.ndarray] = {kind: spans[kind] for kind in stack}
    shares_of[None] = 1 - spans.sum(axis=0)
    for number in range(_BINS):
        bottom = top + _LANE
        for kind, shares in shares_of.items():
            height = min(float(shares[number]) * _LANE, bottom - top)
            if height > _FAINT:
                bottom -= height
                yield _rect(_LEFT + 2 * number, bottom, 2, height, _COLOURS[kind])


def _binned(profile: RankProfile, begin: float, end: float) -> np.ndarray:
    """float64 [kinds, _BINS]: the share of each piece of the time that each kind of span covers."""
    edges = np.linspace(begin, end, _BINS + 1)
    result = np.zeros((len(Kind), _BINS))
    for kind in Kind:
        spans = [
            (profile.on_common_clock(s.begin), profile.on_common_clock(s.end))
            for s in profile.spans
            if s.kind is kind
        ]
        if not spans:
            continue
        # Time covered before a moment grows by 1 inside spans: known where spans begin and end.
        moments = np.array(spans).reshape(-1)
        lengths = np.array([[0.0, e - b] for b, e in spans]).reshape(-1)
        covered = np.interp(edges, moments, np.cumsum(lengths))
        result[kind] = np.diff(covered) / np.diff(edges)
    return result


def _close_up(profiles: Sequence[RankProfile], busy: Busy) -> tuple[float, float]:
    """The time of a few steps of the rank with most of them, at three quarters of the job."""
    runs = max(
        ([s for s in p.spans if s.kind is Kind.RUN] for p in profiles),
        key=len,
    )
    profile = next(p for p in profiles if runs[0] in p.spans)
    last = max(0, min(len(runs) - _CLOSE_UP_STEPS, 3 * len(runs) // 4))
    chosen = runs[last : last + _CLOSE_UP_STEPS]
    begin = max(busy.begin, profile.on_common_clock(chosen[0].begin))
    return begin, profile.on_common_clock(chosen[-1].end)


def _spans(profile: RankProfile, begin: float, end: float, top: float) -> Iterator[str]:
    # Gaps between spans show the ground: what is in no span is Python's.
    yield _rect(_LEFT, top, _PLOT, _LANE, _COLOURS[None])
    scale = _PLOT / (end - begin)
    for span in profile.spans:
        first = max(begin, profile.on_common_clock(span.begin))
        last = min(end, profile.on_common_clock(span.end))
        if last > first:
            x = _LEFT + (first - begin) * scale
            yield _rect(x, top, (last - first) * scale, _LANE, _COLOURS[span.kind])


def _axis(top: float, milliseconds: float) -> Iterator[str]:
    for fifth in range(6):
        x = _LEFT + _PLOT * fifth / 5
        yield f"<path d='M{x:.1f} {top - 4}v6' stroke='#333333'/>"
        yield _text(x, top + 16, f"{milliseconds * fifth / 5:,.1f} ms", anchor="middle")


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f"<rect x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}' fill='{colour}'/>"
    )


def _text(x: float, y: float, text: str, colour: str = "#222222", anchor: str = "start") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' fill='{colour}' text-anchor='{anchor}'>"
        f"{escape(text)}</text>"
    )
