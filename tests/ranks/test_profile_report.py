"""What is printed, traced and drawn agrees with what the ranks recorded, on one clock."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.profile import check_folder, profile_settings
from buddy_pipeline.ranks.profile_picture import write_picture
from buddy_pipeline.ranks.profile_report import busy_shares, by_template, report
from buddy_pipeline.ranks.profile_spans import Kind, Span, Spans
from buddy_pipeline.ranks.profile_trace import write_trace
from tests.ranks.profiles import MS, rank_profile, stage_times, two_ranks


def test_busy_shares_are_taken_on_one_clock() -> None:
    busy = busy_shares(two_ranks())
    assert busy is not None
    assert (busy.begin, busy.end) == (0, 6 * MS)
    assert busy.shares == pytest.approx((1 / 3, 2 / 3))
    assert busy.bubble == pytest.approx(1 / 2)


def test_without_a_run_nobody_was_busy(tmp_path: Path) -> None:
    idle = [rank_profile(0, [Span(Kind.RECEIVE, 0, MS)])]
    assert busy_shares(idle) is None
    write_picture(tmp_path / "p.svg", idle)
    assert "no rank ran" in (tmp_path / "p.svg").read_text()


def test_regions_of_layers_that_share_code_are_one_line() -> None:
    times = by_template(stage_times(layers=3).regions)
    assert list(times) == ["layers 0 to 2: linear up_proj", "layers 0 to 2: island 0"]
    assert [(t.calls, t.wall, t.waits) for t in times.values()] == [(3, 3 * MS, 1.5 * MS)] * 2


def test_the_report_has_a_table_for_each_rank() -> None:
    text = "\n".join(report(two_ranks(), slots=9))
    assert "profile of rank 0 on node<1>, 1 thread: 1 step in 0.005 s\n" in text
    assert "clock +100000.0 µs ± 1.0" in text
    assert "first region to last 4.000 ms, in regions 4.000 ms" in text
    assert "waiting, thread 0 1.000 ms" in text
    assert ", before and after " in text
    assert "rank 0 33.3 %, rank 1 66.7 %; bubble 50.0 %" in text
    assert "warning" not in text


def test_a_full_table_is_a_warning_that_names_the_mend() -> None:
    full = [rank_profile(0, [Span(Kind.RUN, 0, MS)], stage=stage_times(without_slot=3))]
    (warning,) = [line for line in report(full, slots=4) if "warning" in line]
    assert "3 regions of a step" in warning
    assert warning.endswith("set BUDDY_PIPELINE_PROFILE_SLOTS=7")


def test_the_trace_has_every_span_on_one_clock(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", two_ranks())
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    steps = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") == "step"]
    assert steps == [
        (0, "receive", 0.0, 2000.0),
        (0, "run", 2000.0, 2000.0),
        (0, "sample", 4000.0, 1000.0),
        (1, "run", 0.0, 2000.0),
        (1, "run", 4000.0, 2000.0),
    ]
    regions = [e["name"] for e in events if e.get("cat") == "region"]
    assert regions[:2] == ["layer0: linear up_proj", "layer0: island 0"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"rank 0 on node<1>", "rank 1 on node<1>", "steps", "thread 0"}


def test_the_picture_is_well_formed_and_says_who_was_busy(tmp_path: Path) -> None:
    write_picture(tmp_path / "p.svg", two_ranks())
    texts = [e.text or "" for e in ElementTree.parse(tmp_path / "p.svg").iter() if "text" in e.tag]
    assert texts[0] == "2 ranks over 0.006 s: bubble 50.0 %"
    assert {"33.3 % busy", "66.7 % busy", "node<1>"} <= set(texts)


class Box:
    """Something with a method to watch."""

    def double(self, value: int, *, plus: int = 0) -> int:
        return 2 * value + plus


def test_a_watched_method_does_what_it_did_and_is_recorded() -> None:
    spans, box, after = Spans(), Box(), []
    spans.watch(box, "double", Kind.SEND, after=lambda: after.append(1))
    assert box.double(3, plus=1) == 7
    assert box.double(4) == 8
    assert spans.counts == [0, 0, 2, 0]
    first, second = spans.kept
    assert spans.begin <= first.begin <= first.end <= second.begin <= second.end == spans.end
    assert spans.totals[Kind.SEND] == sum(s.end - s.begin for s in spans.kept)
    assert after == [1, 1]
    assert Box().double(1) == 2, "only the watched object is changed"


@pytest.mark.parametrize("switch", [{}, {"BUDDY_PIPELINE_PROFILE": "0"}])
def test_there_is_no_profile_unless_asked_for(switch: dict[str, str]) -> None:
    assert profile_settings(None, switch) is None


def test_the_environment_or_a_folder_asks_for_one(tmp_path: Path) -> None:
    slots = {"BUDDY_PIPELINE_PROFILE_SLOTS": "2"}
    by_folder = profile_settings(tmp_path, slots)
    by_variable = profile_settings(None, {"BUDDY_PIPELINE_PROFILE": "1"})
    assert by_folder is not None
    assert by_variable is not None
    assert (by_folder.slots, by_folder.folder) == (2, tmp_path)
    assert by_variable.folder is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [("BUDDY_PIPELINE_PROFILE", "yes"), ("BUDDY_PIPELINE_PROFILE_SLOTS", "0")]
    + [("BUDDY_PIPELINE_PROFILE_SLOTS", text) for text in ("", "-1", "1.5", "²")],
)
def test_a_wrong_variable_is_named_with_its_value(variable: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{variable} is '{value}': use "):
        profile_settings(None, {variable: value})


def test_a_folder_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"--profile-out \S+/file/x cannot be made: Not a directory"
    ):
        check_folder(tmp_path / "file" / "x")
    check_folder(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()
