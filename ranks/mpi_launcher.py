"""What the program that starts the ranks (`mpirun`, `srun`) tells each of them.

Imports next to nothing: the process that looks after a rank keeps what it has imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from buddy_pipeline.partition.errors import UserError

# (rank, size, local rank) as each launcher tells them. The first that names a rank is taken:
# an Open MPI process also has PMIX_RANK, and srun sets its own variables whether or not it speaks
# a process manager interface, so SLURM_* only completes what the others leave out.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


class Launcher(NamedTuple):
    """What the environment says about this process, before any MPI library is loaded."""

    rank: int
    size: int | None
    """Ranks that were started; None if the launcher does not tell."""
    local_rank: int | None
    """Place among the ranks of this host; None if the launcher does not tell."""


def detect_launcher(environ: Mapping[str, str] = os.environ) -> Launcher | None:
    """The launcher that started this process, read from the environment; None without one.

    Knows MPICH, Intel MPI and srun --mpi=pmi2 (PMI_*), Open MPI (OMPI_*) and PMIx (PMIX_RANK).
    Raises UserError if a variable that must be a number is not.
    """
    for rank, size, local in _VARIABLES:
        if rank in environ:
            known_rank = _number(environ, rank)
            assert known_rank is not None
            return Launcher(known_rank, _number(environ, size), _number(environ, local))
    return None


def is_bystander() -> bool:
    """Whether this process has nothing to do for a command that one process does: it was started
    as one of several ranks, and is not rank 0."""
    launcher = detect_launcher()
    return launcher is not None and launcher.rank != 0


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise UserError(
            f"environment variable {name}={text!r} is not a rank or count: "
            "unset it, or start through mpirun"
        )
    return int(text)
