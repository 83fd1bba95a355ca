"""Read a process's place from its launcher's variables: torchrun, Open MPI, MVAPICH2, MPICH, Intel MPI, Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .. import env
from .slurm import SlurmStep, slurm_step


@dataclass(frozen=True)
class LauncherEnv:
    """A process's place as its launcher's variables say it, not checked yet. None where a variable is missing.

    Attributes:
        launcher: its name, for people.
        rank, world_size, local_rank, local_world_size, host_rank: as in `World`.
        names: variables of rank, world_size, local_rank and local_world_size.
        step: the step of srun, under Slurm.
    """

    launcher: str
    rank: int | None
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    host_rank: int | None
    names: tuple[str, ...]
    step: SlurmStep | None = None


# Each launcher's variables of rank, world size, local rank, local world size and, if there is one, the host's number.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
# Open MPI's NODE_RANK is no host's number, but the rank among all of this host's processes: it is not read.
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_MVAPICH2 = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")
# mpiexec of MPICH and Intel MPI (Hydra) sets all four. Slurm's `srun --mpi=pmi2` sets the first two only.
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def read_torchrun(environ: Mapping[str, str]) -> LauncherEnv | None:
    """Read RANK, WORLD_SIZE and so on, from torchrun, `photinus run` or the user; return None if both are missing.

    Raises:
        ValueError: a variable is not a whole number.
    """
    names = {env.EXPECTED_WORLD_SIZE.name: "photinus run", env.JOB_ID.name: "torchrun"}  # what only that one sets
    launcher = next((launcher for name, launcher in names.items() if name in environ), "the environment")
    return _read(launcher, _TORCHRUN, environ)


def read_scheduler(environ: Mapping[str, str]) -> LauncherEnv | None:
    """Read this process's place from mpirun, mpiexec or srun; return None if none of them started it.

    MPI comes first: its mpirun, used inside of Slurm, starts its helpers by srun, and the ranks inherit what Slurm told
    those helpers.

    Raises:
        ValueError: a variable is not a whole number.
    """
    place = _read("Open MPI", _OPEN_MPI, environ) or _read("MVAPICH2", _MVAPICH2, environ)
    if place is None and _HYDRA[2] in environ:
        place = _read("MPICH", _HYDRA, environ)
    if place is not None:
        return place
    step = slurm_step(environ)
    if step is not None:
        return LauncherEnv(
            "Slurm",
            step.rank,
            step.tasks,
            step.local_rank,
            step.local_tasks,
            step.host_rank,
            ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
            step,
        )
    return _read("MPICH", _HYDRA, environ)  # another process manager that speaks PMI


def _read(launcher: str, names: tuple[str, ...], environ: Mapping[str, str]) -> LauncherEnv | None:
    if names[0] not in environ and names[1] not in environ:
        return None

    def number(name: str) -> int | None:
        text = environ.get(name)
        if not text:
            return None
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} (from {launcher}) is not a whole number") from None

    rank, world_size, local_rank, local_world_size, *host_rank = map(number, names)
    return LauncherEnv(launcher, rank, world_size, local_rank, local_world_size, next(iter(host_rank), None), names[:4])
