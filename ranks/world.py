"""Who this process is among the ranks that `mpirun` (or `srun`) started."""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.affinity import CoreShare, available_cores, core_share
from buddy_pipeline.ranks.mpi_launcher import Launcher, detect_launcher


@dataclass(frozen=True)
class World:
    """This rank's place in the job."""

    rank: int
    world: int
    local_rank: int
    """Place among the ranks on this host, by rank."""
    neighbours: tuple[int, ...]
    """The ranks on this host, ascending, this one among them."""
    hostname: str
    comm: Any = field(repr=False)
    """mpi4py communicator of all ranks that carries only our messages; None in a world of one."""
    cores: CoreShare
    """The cores of this rank."""

    @property
    def local_size(self) -> int:
        """Ranks on this host."""
        return len(self.neighbours)


#: Whether this process has met the other ranks of its job.
_has_met = False


def join_world(environ: Mapping[str, str] = os.environ, purpose: str = "") -> World:
    """Meet the other ranks (every rank calls this once) and return this rank's place among them.

    purpose: what this rank is there for, in a word or two; the same on all.

    Without a launcher, or with one that started a single rank, no MPI library is loaded. Raises
    UserError if a launcher started several ranks and mpi4py is missing, finds no MPI library, or
    belongs to another MPI than the launcher; if this rank has met the others before, who would not
    come again; on all ranks, if their purposes differ.
    """
    global _has_met
    launcher = detect_launcher(environ)
    hostname = socket.gethostname()
    if launcher is None or launcher.size == 1:
        cores = core_share([available_cores()], 0)
        return World(0, 1, 0, (0,), hostname, None, cores)
    mpi = _load_mpi(launcher)
    if _has_met:
        raise UserError(
            "a program of several ranks has one pipeline, at whose end ranks other than 0 leave:"
            " keep it open for all that there is to do"
        )
    comm = mpi.COMM_WORLD
    if launcher.size is not None and comm.Get_size() != launcher.size:
        library = " ".join(mpi.Get_library_version().split("\n")[0].split())
        raise UserError(
            f"the launcher started {counted(launcher.size, 'rank')} but mpi4py's MPI ({library}) "
            f"sees {comm.Get_size()}: start with the mpirun of that MPI{_own_mpirun()}, "
            "or install mpi4py for the launcher's MPI"
        )
    comm = comm.Dup()
    _has_met = True
    rank = comm.Get_rank()
    # Only here, since a world of one does without.
    from buddy_pipeline.ranks.exchange import all_gather

    mine = (hostname, available_cores(), purpose)
    everyone = all_gather(comm, mine, tuple[str, frozenset[int], str])
    _check_purposes([theirs for _, _, theirs in everyone])
    local = [other for other, (host, _, _) in enumerate(everyone) if host == hostname]
    local_rank = local.index(rank)
    return World(
        rank=rank,
        world=len(everyone),
        local_rank=local_rank,
        neighbours=tuple(local),
        hostname=hostname,
        comm=comm,
        cores=core_share([everyone[other][1] for other in local], local_rank),
    )


def _check_purposes(purposes: Sequence[str]) -> None:
    """Raises UserError if the ranks of one job do not want the same: they would never meet."""
    for rank, purpose in enumerate(purposes):
        if purpose != purposes[0]:
            raise UserError(
                f"rank 0 was started to {purposes[0]} and rank {rank} to {purpose}: give all ranks"
                " of an mpirun the same command"
            )


def _load_mpi(launcher: Launcher) -> Any:
    started = "several ranks" if launcher.size is None else counted(launcher.size, "rank")
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
