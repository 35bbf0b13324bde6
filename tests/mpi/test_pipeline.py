"""The logits do not depend on how many ranks the pipeline has or on what else is in it, and every
rank takes part."""

import json
from functools import cache
from typing import Any

import pytest

from tests.mpi.job import mpirun, needs_mpi

pytestmark = [pytest.mark.mpi, needs_mpi]


@cache
def result(world: int) -> dict[str, Any]:
    ended = mpirun(world, "pipeline.py")
    assert (ended.code, ended.stderr) == (0, "")
    return json.loads(ended.stdout)


# World 5 gives rank 1, in the middle, and rank 0 no layer.
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_logits_are_those_of_one_rank(world: int) -> None:
    assert result(world)["together"] == result(1)["together"]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sequences_that_run_together_have_the_logits_they_have_alone(world: int) -> None:
    assert result(world)["together"] == result(world)["alone"]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_peak_memory_has_an_entry_a_rank(world: int) -> None:
    peaks = result(world)["peak_memory"]
    assert len(peaks) == world
    assert all(1 << 20 < peak < 1 << 32 for peak in peaks)
