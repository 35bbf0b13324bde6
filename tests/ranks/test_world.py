"""A process finds its place from the launcher's environment, and needs MPI only for company."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.mpi_launcher import Launcher, detect_launcher
from buddy_pipeline.ranks.world import join_world
from tests import jobs
from tests.mpi.job import MPIRUN, needs_mpi

PMI = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        (PMI, Launcher(1, 4, 1)),
        (OPEN_MPI, Launcher(2, 3, 0)),
        ({**OPEN_MPI, "PMIX_RANK": "2"}, Launcher(2, 3, 0)),
        ({"PMIX_RANK": "5"}, Launcher(5, None, None)),
        (
            {"PMIX_RANK": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"},
            Launcher(5, 8, 1),
        ),
    ],
)
def test_launchers_are_told_apart(environ: dict[str, str], launcher: Launcher | None) -> None:
    assert detect_launcher(environ) == launcher


def test_a_rank_that_is_no_number_is_an_error_naming_the_variable() -> None:
    with pytest.raises(UserError, match=r"PMI_RANK='x'.*unset it"):
        detect_launcher({"PMI_RANK": "x"})


@pytest.mark.parametrize("environ", [{}, {**PMI, "PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_a_single_rank_needs_no_mpi(environ: dict[str, str]) -> None:
    code = (
        "import sys; from buddy_pipeline.ranks.world import join_world; w = join_world(); "
        "print(w.rank, w.world, w.local_rank, w.local_size, w.comm, 'mpi4py' in sys.modules)"
    )
    done = run(code, environ)
    assert (done.stdout, done.stderr) == ("0 1 0 1 None False\n", "")


def test_a_missing_mpi4py_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=r"4 ranks but the Python package mpi4py is missing: pip"):
        join_world(PMI)


needs_mpi4py = pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
JOIN_OR_SAY_WHY = """
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.faults import exit_alone
from buddy_pipeline.ranks.world import join_world
from tests import jobs
from tests.mpi.job import MPIRUN, needs_mpi
try:
    join_world()
except UserError as error:
    exit_alone(error)
"""


@needs_mpi4py
def test_a_missing_mpi_library_is_one_line() -> None:
    done = run(JOIN_OR_SAY_WHY, {**PMI, "MPI_LOCALRANKID": "0", "MPI4PY_LIBMPI": "/no/libmpi.so"})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "cannot use an MPI library" in done.stderr


@needs_mpi4py
@pytest.mark.mpi
def test_an_mpi_of_another_launcher_is_one_line_a_host() -> None:
    ranks = [
        run(JOIN_OR_SAY_WHY, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": local})
        for local in ("0", "1")
    ]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "started 3 ranks but mpi4py's MPI" in ranks[0].stderr
    assert "sees 1: start with the mpirun of that MPI" in ranks[0].stderr
    assert ranks[0].stderr.count("\n") == 1
    assert ranks[1].stderr == ""


@needs_mpi
@pytest.mark.mpi
def test_ranks_do_not_meet_a_second_time() -> None:
    """The others are gone by then, so that it would wait for ever."""
    program = "from buddy_pipeline.ranks.world import join_world; join_world()\n" + JOIN_OR_SAY_WHY
    done = jobs.finish(jobs.start(MPIRUN, "-n", 2, sys.executable, "-c", program), jobs.TIMEOUT_S)
    assert done.code != 0
    assert "a program of several ranks has one pipeline" in done.stderr
    assert "Traceback" not in done.stderr


def run(code: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, with no launcher's variables but those given."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PMI", "OMPI_", "MPI_", "SLURM_"))
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=30,
    )
