"""The compiled code counts its regions: what it says adds up, whatever the threads and slots."""

import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns

import pytest

from buddy_pipeline.ranks.profile_regions import StageTimes
from tests.ranks.made_stage import MadeStage

ROOT = Path(__file__).parents[2]
LAYERS, STEPS = 3, 4
#: Of the three regions of each layer.
TICKS = (20_000, 60_000, 10_000)


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda count: f"{count} threads")
def made(request: pytest.FixtureRequest) -> MadeStage:
    return MadeStage(LAYERS, TICKS, threads=request.param)


def profiled(made: MadeStage, slots: int = 100, steps: int = STEPS) -> StageTimes:
    profile = made.stage.profile(slots)
    try:
        made.run(steps)
    finally:
        made.stage.stop_profile()
    return profile.read()


def test_every_region_of_every_layer_is_counted_under_its_name(made: MadeStage) -> None:
    times = profiled(made)
    assert times.steps == STEPS
    assert [(r.region.partition, r.region.name) for r in times.regions] == [
        (f"layer{layer}", f"region {number}") for layer in range(LAYERS) for number in range(3)
    ]
    assert {r.calls for r in times.regions} == {STEPS}


def test_first_region_to_last_is_regions_and_gaps(made: MadeStage) -> None:
    times = profiled(made)
    assert times.span == pytest.approx(times.in_regions + times.between_regions, rel=1e-9)
    gaps_after = sum(r.gap_after for r in times.regions)
    first_gaps = times.regions[0].gap_before
    assert gaps_after == pytest.approx(times.between_regions - first_gaps, rel=1e-9)


def test_a_gap_after_a_region_is_the_gap_before_the_next(made: MadeStage) -> None:
    regions = profiled(made).regions
    for this, following in pairwise(regions):
        assert this.gap_after == following.gap_before
    assert regions[-1].gap_after == 0


def test_the_span_lies_within_the_time_of_the_calls(made: MadeStage) -> None:
    begin = perf_counter_ns()
    times = profiled(made)
    assert 0 < times.span < perf_counter_ns() - begin


def test_each_region_takes_at_least_its_work_of_the_last_thread(made: MadeStage) -> None:
    times = profiled(made)
    # A tick is as long in one region as in another: lengths in ns have the ratio of the ticks.
    work = [r.wall for r in times.regions]
    shortest = min(w / t for w, t in zip(work, TICKS * LAYERS, strict=True))
    assert shortest > 0
    assert times.in_regions >= shortest * sum(TICKS) * LAYERS


def test_threads_wait_for_the_one_with_most_to_do(made: MadeStage) -> None:
    """In the round that was disturbed least: a busy machine may stop the other thread longest."""
    rounds = [profiled(made) for _ in range(10)]
    if made.stage.threads == 1:
        assert all(times.waits == times.first_waits for times in rounds)
        assert min(times.waits / times.in_regions for times in rounds) < 1 / 10
    else:
        # Thread 0 has the least work of all and waits for that of the others.
        assert max(times.first_waits / times.in_regions for times in rounds) > 1 / 3
        assert all(times.waits > times.first_waits for times in rounds)


def test_the_sums_are_the_wall_time_of_a_step_within_2_percent() -> None:
    made = MadeStage(1, [3_000_000, 1_000_000], threads=2)  # about as long as a decode step
    made.run(2)  # wakes the team
    profile = made.stage.profile(slots=100)
    walls = []
    for _ in range(20):
        step, begin = made.step(), perf_counter_ns()
        made.stage.run(step, 0, 0)
        walls.append(perf_counter_ns() - begin)
        profile.keep_step()
    made.stage.stop_profile()
    spans = [step.times[0, -1, -1] - step.times[0, 0, 0] for step in profile.read().traced]
    # Of the step that was disturbed least: a busy machine can stop a thread between two clocks.
    assert max(span / wall for span, wall in zip(spans, walls, strict=True)) > 0.98


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_team_starts_with_the_stage_and_not_within_a_step() -> None:
    program = (
        "import os\n"
        "from tests.ranks.made_stage import MadeStage\n"
        "def threads(): return len(os.listdir('/proc/self/task'))\n"
        "counts = [threads()]\n"
        "made = MadeStage(1, [1_000], threads=3)\n"
        "counts.append(threads())\n"
        "made.run(1)\n"
        "counts.append(threads())\n"
        "print(counts[1] - counts[0] >= 2, counts[2] - counts[1])\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, "True 0\n"), run.stderr


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_what_has_no_slot_is_counted_together(made: MadeStage, slots: int) -> None:
    times = profiled(made, slots)
    regions = LAYERS * len(TICKS)
    assert times.without_slot == regions - slots
    assert [r.region.name for r in times.regions[slots:]] == ["other"]
    assert [r.calls for r in times.regions] == [STEPS] * slots + [STEPS * (regions - slots)]
    assert times.span == pytest.approx(times.in_regions + times.between_regions, rel=1e-9)


def test_exactly_enough_slots_leave_no_other(made: MadeStage) -> None:
    times = profiled(made, slots=LAYERS * len(TICKS))
    assert times.without_slot == 0
    assert len(times.regions) == LAYERS * len(TICKS)


def test_nothing_is_counted_before_and_after(made: MadeStage) -> None:
    made.run(1)
    profile = made.stage.profile(slots=100)
    made.run(1)
    made.stage.stop_profile()
    made.run(1)
    assert profile.read().steps == 1


def test_two_stages_at_once_are_counted_apart() -> None:
    quick, slow = MadeStage(1, [1_000], threads=2), MadeStage(2, [50_000], threads=2)
    results: dict[str, StageTimes] = {}

    def work(name: str, made: MadeStage, steps: int) -> None:
        results[name] = profiled(made, steps=steps)

    threads = [
        threading.Thread(target=work, args=("quick", quick, 40)),
        threading.Thread(target=work, args=("slow", slow, 10)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.calls for r in results["quick"].regions] == [40]
    assert [r.calls for r in results["slow"].regions] == [10, 10]
    for times in results.values():
        assert times.span == pytest.approx(times.in_regions + times.between_regions, rel=1e-9)


def test_traced_regions_follow_each_other_on_the_clock_of_python(made: MadeStage) -> None:
    profile = made.stage.profile(slots=100)
    begin = perf_counter_ns()
    made.run(1)
    profile.keep_step()
    end = perf_counter_ns()
    made.stage.stop_profile()
    (step,) = profile.read().traced
    assert step.times.shape == (made.stage.threads, LAYERS * len(TICKS), 3)
    slack = 100_000  # of the clock's calibration, ns
    for times in step.times.reshape(made.stage.threads, -1):
        assert (times[1:] >= times[:-1]).all()
        assert times[0] > begin - slack
        assert times[-1] < end + slack


def test_another_openmp_runtime_in_the_process_does_not_mix_up_the_threads() -> None:
    program = (
        "import torch\n"  # brings GNU's OpenMP, whose names every library then sees
        "from tests.ranks.made_stage import MadeStage\n"
        "made = MadeStage(1, [1_000], threads=2)\n"
        "profile = made.stage.profile(slots=1)\n"
        "made.run(3)\n"
        "print(profile.read().steps)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout) == (0, "3\n"), run.stderr
