"""Who this process is among the ranks that `mpirun` (or `srun`) started."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.affinity import CoreShare, available_cores, core_share

# (rank, size, local rank) as each launcher tells them. The first that names a rank is taken:
# an Open MPI process also has PMIX_RANK, and srun sets its own variables whether or not it speaks
# a process manager interface, so SLURM_* only completes what the others leave out.
_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Launcher:
    """What the environment says about this process, before any MPI library is loaded."""

    rank: int
    size: int | None
    """Ranks that were started; None if the launcher does not tell."""
    local_rank: int | None
    """Place among the ranks of this host; None if the launcher does not tell."""


@dataclass(frozen=True)
class World:
    """This rank's place in the job."""

    rank: int
    world: int
    local_rank: int
    """Place among the ranks on this host, by rank."""
    local_size: int
    """Ranks on this host."""
    hostname: str
    comm: Any = field(repr=False)
    """mpi4py communicator of all ranks that carries only our messages; None in a world of one."""
    cores: CoreShare
    """The cores of this rank."""


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


def join_world(environ: Mapping[str, str] = os.environ) -> World:
    """Meet the other ranks (every rank calls this once) and return this rank's place among them.

    Without a launcher, or with one that started a single rank, no MPI library is loaded. Raises
    UserError if a launcher started several ranks and mpi4py is missing, finds no MPI library, or
    belongs to another MPI than the launcher.
    """
    launcher = detect_launcher(environ)
    hostname = socket.gethostname()
    if launcher is None or launcher.size == 1:
        cores = core_share([available_cores()], 0)
        return World(0, 1, 0, 1, hostname, None, cores)
    mpi = _load_mpi(launcher)
    comm = mpi.COMM_WORLD
    if launcher.size is not None and comm.Get_size() != launcher.size:
        library = " ".join(mpi.Get_library_version().split("\n")[0].split())
        raise UserError(
            f"the launcher started {launcher.size} ranks but mpi4py's MPI ({library}) sees "
            f"{comm.Get_size()}: start with the mpirun of that MPI{_own_mpirun()}, "
            "or install mpi4py for the launcher's MPI"
        )
    comm = comm.Dup()
    rank = comm.Get_rank()
    # Only here, since a world of one does without.
    from buddy_pipeline.ranks.exchange import all_gather

    everyone = all_gather(comm, (hostname, available_cores()), tuple[str, frozenset[int]])
    local = [other for other, (host, _) in enumerate(everyone) if host == hostname]
    local_rank = local.index(rank)
    return World(
        rank=rank,
        world=len(everyone),
        local_rank=local_rank,
        local_size=len(local),
        hostname=hostname,
        comm=comm,
        cores=core_share([everyone[other][1] for other in local], local_rank),
    )


def _load_mpi(launcher: Launcher) -> Any:
    started = "several ranks" if launcher.size is None else f"{launcher.size} ranks"
    try:
        with warnings.catch_warnings():
            # mpi4py's word on an MPI that is not the launcher's; join_world has a better one.
            warnings.filterwarnings("ignore", "suspicious MPI execution environment")
            from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise UserError(
            f"the launcher started {started} but the Python package {error.name} is missing: "
            "pip install 'buddy-pipeline[mpi]'"
        ) from error
    except (ImportError, RuntimeError) as error:
        # mpi4py imports, then fails to load or to initialise libmpi.
        reason = " ".join(str(error).split())
        raise UserError(
            f"the launcher started {started} but mpi4py cannot use an MPI library ({reason}): "
            "pip install mpich, or put the system's MPI library on the library path"
        ) from error
    return MPI


def _own_mpirun() -> str:
    mpirun = Path(sys.executable).parent / "mpirun"
    return f" ({mpirun})" if mpirun.exists() else ""


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
