"""Ranks of one host have one clock: the estimated offset must be zero within its own error."""

import json

import pytest

from tests.mpi.job import mpirun, needs_mpi

pytestmark = [pytest.mark.mpi, needs_mpi]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_offset_is_zero_within_its_error(world: int) -> None:
    ended = mpirun(world, "clock.py")
    assert (ended.code, ended.stderr) == (0, "")
    offsets = json.loads(ended.stdout)
    assert len(offsets) == world
    assert offsets[0] == [0.0, 0.0]
    for offset, error in offsets[1:]:
        assert abs(offset) <= error
