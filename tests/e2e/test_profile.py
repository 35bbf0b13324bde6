"""The profile of a real run: nothing changes with it, and what it says adds up."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.e2e.command import answer, buddy_pipeline, refusal
from tests.mpi.job import needs_mpi

RUN = [*["--spec", "smollm2-135m", "--raw", "--prompt", "The capital of France is"], "--ignore-eos"]
NEW_TOKENS = 12

pytestmark = pytest.mark.usefixtures("smollm2")


def run(folder: Path, cache: Path, *arguments: object, **how: Any) -> dict[str, Any]:
    tokens = ["--max-tokens", NEW_TOKENS, "--top-logits", 10]
    return answer(folder / "out.json", *RUN, *tokens, *arguments, cache=cache, **how)


def test_results_are_the_same_bits_with_and_without(tmp_path: Path, cache: Path) -> None:
    plain = run(tmp_path, cache)
    watched = run(tmp_path, cache, env={"BUDDY_PIPELINE_PROFILE": "1"})
    assert watched["token_ids"] == plain["token_ids"]
    assert watched["top_logits"] == plain["top_logits"]


def test_the_table_adds_up(tmp_path: Path, cache: Path) -> None:
    ended = buddy_pipeline(
        *[*RUN, "--max-tokens", NEW_TOKENS, "--threads", 1],
        cache=cache,
        env={"BUDDY_PIPELINE_PROFILE": "1"},
    )
    assert ended.code == 0, ended.stderr
    assert f"1 thread: {NEW_TOKENS} steps in " in ended.stderr
    table_row = re.search(r"^  run +([\d,.]+) ", ended.stderr, re.MULTILINE)
    totals = re.search(
        r"first region to last ([\d,.]+) ms, in regions ([\d,.]+) ms, between regions ([\d,.]+) ms",
        ended.stderr,
    )
    assert table_row is not None
    assert totals is not None
    run_ms = milliseconds(table_row[1])
    span, inside, between = (milliseconds(text) for text in totals.groups())
    assert span == pytest.approx(inside + between, abs=0.002)
    assert 0 < span <= run_ms
    regions = re.findall(r"layers 0 to 29: \S.*?  +([\d,]+) ", ended.stderr)
    assert regions
    assert set(regions) == {str(30 * NEW_TOKENS)}


def milliseconds(text: str) -> float:
    return float(text.replace(",", ""))


def test_a_table_of_two_slots_counts_the_rest_as_other(tmp_path: Path, cache: Path) -> None:
    ended = buddy_pipeline(
        *[*RUN, "--max-tokens", 2],
        cache=cache,
        env={"BUDDY_PIPELINE_PROFILE": "1", "BUDDY_PIPELINE_PROFILE_SLOTS": "2"},
    )
    assert ended.code == 0
    assert re.search(r"^  other +\d+ ", ended.stderr, re.MULTILINE)
    assert re.search(r"warning: \d+ regions of a step are beyond the table's 2 slots", ended.stderr)


@pytest.mark.mpi
@needs_mpi
def test_two_ranks_leave_one_trace_and_one_picture(tmp_path: Path, cache: Path) -> None:
    out = tmp_path / "made" / "profile"
    plain = run(tmp_path, cache)
    watched = run(tmp_path, cache, "--profile-out", out, ranks=2)
    assert watched["token_ids"] == plain["token_ids"]
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    runs = [(e["ts"], e["ts"] + e["dur"], e["pid"]) for e in events if e["name"] == "run"]
    assert len(runs) == 2 * NEW_TOKENS
    # One sequence: ranks take turns, rank 1 first. Their clocks are one within some µs.
    order = sorted(runs)
    assert [pid for *_, pid in order] == [1, 0] * NEW_TOKENS
    assert all(end <= begin + 200 for (_, end, _), (begin, *_) in pairwise(order))
    assert {e["pid"] for e in events if e.get("cat") == "region"} == {0, 1}
    texts = [e.text or "" for e in ElementTree.parse(out / "timeline.svg").iter()]
    assert sum(text.endswith("% busy") for text in texts) == 2


def test_a_wrong_variable_is_one_line(cache: Path) -> None:
    ended = buddy_pipeline(*RUN, cache=cache, env={"BUDDY_PIPELINE_PROFILE": "on"})
    assert refusal(ended) == (
        "environment variable BUDDY_PIPELINE_PROFILE is 'on': use 1 for a profile, or 0"
    )


@pytest.mark.mpi
@needs_mpi
@pytest.mark.parametrize("balance", ["memory", "measured"])
def test_balance_moves_layers_and_changes_no_token(
    balance: str, tmp_path: Path, cache: Path
) -> None:
    assert (
        run(tmp_path, cache, "--balance", balance, ranks=3)["token_ids"]
        == run(tmp_path, cache)["token_ids"]
    )
