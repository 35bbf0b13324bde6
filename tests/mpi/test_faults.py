"""Whatever goes wrong on whichever rank: one message, a non-zero exit, and no rank left behind."""

import re
import signal
import time

import pytest

from tests.jobs import TIMEOUT_S, Ended, end, eventually, gone
from tests.mpi.job import mpirun, needs_mpi, ranks_of, start

pytestmark = [pytest.mark.mpi, needs_mpi]

WORLD = 3
EVERY_RANK = range(WORLD)


def fail(fault: str, where: object, *more: object, world: int = WORLD) -> Ended:
    """The end of a job with a fault; checks what holds for all of them."""
    ended = mpirun(world, "pipeline.py", fault, where, *more)
    assert ended.code != 0
    assert "Traceback" not in ended.stderr
    assert "together" not in ended.stdout
    return ended


def messages(ended: Ended) -> list[str]:
    """Our lines on stderr; mpirun adds its own when ranks were killed."""
    return re.findall(r"^buddy-pipeline: error: (.*)$", ended.stderr, re.MULTILINE)


@pytest.mark.parametrize("rank", EVERY_RANK)
def test_an_exception_is_one_line_with_its_rank(rank: int) -> None:
    (line,) = messages(fail("raises", rank))
    assert re.fullmatch(rf"rank {rank} of 3 on \S+: RuntimeError: the kernel fell over", line)


@pytest.mark.parametrize("rank", EVERY_RANK)
def test_a_killed_rank_takes_the_others_with_it(rank: int) -> None:
    assert messages(fail("killed", rank)) == []


@pytest.mark.parametrize("rank", [0, 2])
def test_a_terminated_rank_ends_the_job_in_silence(rank: int) -> None:
    assert messages(fail("terminated", rank)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_job_leaves_no_rank_behind(number: signal.Signals) -> None:
    ended = mpirun(WORLD, "pipeline.py", "hangs", 1, interrupt=("hanging", number))
    assert ended.code != 0
    assert messages(ended) == []
    assert "Traceback" not in ended.stderr
    (pid,) = re.findall(r"hanging (\d+)", ended.stdout)
    assert eventually(lambda: gone(int(pid)))


def test_ranks_of_a_killed_mpirun_end_too() -> None:
    ended = mpirun(WORLD, "pipeline.py", "hangs", 1, interrupt=("hanging", signal.SIGKILL))
    (pid,) = re.findall(r"hanging (\d+)", ended.stdout)
    assert eventually(lambda: gone(int(pid)))


@pytest.mark.parametrize("rank", EVERY_RANK)
def test_one_rank_that_is_not_ready_is_named(rank: int) -> None:
    ended = fail("not_ready", rank)
    assert ended.code == 2
    line = f"buddy-pipeline: error: rank {rank}: model m does not exist: give its path\n"
    assert ended.stderr == line


def test_what_all_ranks_lack_is_said_once() -> None:
    ended = fail("not_ready", "all")
    assert ended.code == 2
    assert ended.stderr == "buddy-pipeline: error: model m does not exist: give its path\n"


def test_different_lacks_are_all_said() -> None:
    ended = fail("not_ready_each", "all")
    assert ended.code == 2
    assert messages(ended) == [f"rank {rank}: rank {rank} has no weights" for rank in EVERY_RANK]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_user_error_amid_the_work_is_one_line(rank: int) -> None:
    (line,) = messages(fail("user_error", rank))
    assert re.fullmatch(
        rf"rank {rank} of 3 on \S+: file w\.gguf was cut short: copy it again", line
    )


def test_rank_0_can_send_the_others_home_amid_a_prefill() -> None:
    ended = fail("declines", 0)
    assert ended.code == 2
    assert ended.stderr == "buddy-pipeline: error: stop string is empty: leave it out\n"


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("sends_noise", r"from rank 2: message starts with .*"),
        ("sends_too_much", r"message from rank 2 is longer than \d+ bytes, .*"),
        ("repeats_a_step", r"from rank 2: message 3, expected 4"),
    ],
)
def test_a_malformed_message_is_refused(fault: str, complaint: str) -> None:
    lines = messages(fail(fault, 2))
    assert any(re.fullmatch(rf"rank 1 of 3 on \S+: ProtocolError: {complaint}", x) for x in lines)


@pytest.mark.parametrize("rank", EVERY_RANK)
def test_a_rank_that_hangs_is_ended_and_named(rank: int) -> None:
    (line,) = messages(fail("hangs", rank, 0.5))
    assert re.fullmatch(
        rf"rank {rank} of 3 on \S+: step \d+ has not ended within 0\.5 s \(--step-timeout\)", line
    )


def test_a_world_of_one_that_hangs_is_ended_too() -> None:
    (line,) = messages(fail("hangs", 0, 0.5, world=1))
    assert re.fullmatch(r"step \d+ has not ended within 0\.5 s \(--step-timeout\)", line)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_does_not_run_any_more_is_named(rank: int) -> None:
    (line,) = messages(fail("stopped", rank, 0.5))
    assert re.fullmatch(
        rf"rank 0 of 3 on \S+: SilentRank: rank {rank} of 3 has not answered for 2\.5 s "
        r"\(--step-timeout\): stopped or out of reach",
        line,
    )


@pytest.mark.parametrize("fault", ["stopped", "stopped_idle"])
def test_rank_0_that_does_not_run_any_more_is_named_by_the_next(fault: str) -> None:
    (line,) = messages(fail(fault, 0, 0.5))
    assert re.fullmatch(
        r"rank 1 of 3 on \S+: SilentRank: rank 0 of 3 has not been heard for 2\.5 s "
        r"\(--step-timeout\): stopped or out of reach",
        line,
    )


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_stops_before_it_is_ready_is_named(rank: int) -> None:
    (line,) = messages(fail("stopped_preparing", rank, 0.5))
    assert re.fullmatch(
        rf"rank 0 of 3 on \S+: SilentRank: rank {rank} of 3 has not answered for 3 s "
        r"\(--step-timeout\): stopped or out of reach",
        line,
    )


def test_rank_0_that_stops_before_it_is_ready_is_named_by_the_next() -> None:
    (line,) = messages(fail("stopped_preparing", 0, 0.5))
    assert re.fullmatch(
        r"rank 1 of 3 on \S+: SilentRank: rank 0 of 3 has not been heard for 3 s "
        r"\(--step-timeout\): stopped or out of reach",
        line,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_prepares_for_long_is_waited_for(rank: int) -> None:
    ended = mpirun(WORLD, "pipeline.py", "prepares_long", rank, 0.5)
    assert (ended.code, ended.stderr) == (0, "")
    assert "together" in ended.stdout


def test_a_job_that_idles_is_left_alone() -> None:
    ended = mpirun(WORLD, "pipeline.py", "idles", 0, 0.5)
    assert (ended.code, ended.stderr) == (0, "")
    assert "together" in ended.stdout


def test_a_job_that_is_stopped_as_a_whole_goes_on() -> None:
    """As a batch system does that suspends a job: no rank takes the pause for another's silence."""
    job = start(WORLD, "pipeline.py", "idles", 0, 0.5)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "idles\n"
        ranks = ranks_of(job)
        assert len(ranks) == WORLD
        for rank in ranks:
            rank.suspend()
        time.sleep(3.5)  # longer than any rank waits for another
        for rank in ranks:
            rank.resume()
        assert job.wait(TIMEOUT_S) == 0
    finally:
        end(job)


def test_ranks_that_are_only_slow_are_waited_for() -> None:
    """Each takes less than the timeout for a step; the step on its way takes longer."""
    ended = mpirun(WORLD, "pipeline.py", "is_slow", "all", 1.0)
    assert (ended.code, ended.stderr) == (0, "")
    assert "together" in ended.stdout
