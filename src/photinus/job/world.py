"""A process's place in its job, as the variables of its launcher say it.

Launchers are torchrun and `photinus run`, Open MPI, MVAPICH2, MPICH, Intel MPI and Slurm.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .. import env
from ..errors import WorldSizeError
from .slurm import SlurmStep, slurm_job, slurm_step, whole_number


class LauncherEnv(NamedTuple):
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

    MPI's variables come first. Inside a Slurm job, mpirun starts its helpers by srun, and the ranks inherit the Slurm
    variables of these helpers.

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

    rank, world_size, local_rank, local_world_size, *host_rank = (
        whole_number(environ, launcher, name) for name in names
    )
    return LauncherEnv(launcher, rank, world_size, local_rank, local_world_size, next(iter(host_rank), None), names[:4])


@dataclass(frozen=True)
class World:
    """The place of a process in its job.

    Attributes:
        rank: rank of this process, 0 <= rank < world_size.
        world_size: number of processes in the job.
        local_rank: index of this process on its host.
        local_world_size: number of the job's processes on this host (world_size if the launcher does not say).
        host_rank: index of this host in the job.
        launcher: name of the launcher whose variables were found; "the environment" for RANK and WORLD_SIZE from
            neither torchrun nor `photinus run`; "none" for a plain `python script.py`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host_rank: int = 0
    launcher: str = "none"

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, the rank that logs and saves."""
        return self.rank == 0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> World:
        """Read the place from the environment: torchrun's variables first, then MPI's, then Slurm's.

        RANK=-1 ("not distributed" in older templates) and no variables at all both mean a world of one. Slurm's
        variables count only inside `srun`, because `salloc` and `sbatch` set some of them for a plain shell.

        Raises:
            WorldSizeError: rank and world size do not fit each other, or one of them is missing; the world size differs
                from the launcher's (PHOTINUS_WORLD_SIZE); or srun or mpirun started more processes than the world has,
                and each world would train alone.
            ValueError: a variable is not a whole number, or a list of Slurm's cannot be read.
        """
        environ = os.environ if environ is None else environ
        by_torchrun, by_scheduler = read_torchrun(environ), read_scheduler(environ)
        job_size = env.EXPECTED_WORLD_SIZE.get(environ)
        place = by_torchrun or (None if job_size == 1 else by_scheduler)  # 1: each of the scheduler's tasks is alone
        world = cls() if place is None else cls._from(place)
        if job_size is not None and job_size != world.world_size:
            raise WorldSizeError(
                f"the launcher expects a world of {job_size} processes ({env.EXPECTED_WORLD_SIZE.name}={job_size}), "
                f"but this process finds a world of {world.world_size}. Do not change RANK or WORLD_SIZE in the "
                f"script; start it with `photinus run --nproc-per-node N` for another size."
            )
        if job_size is None and by_torchrun is not None and by_scheduler is not None:
            check_participants(world.world_size, by_scheduler, environ)
        return world

    @classmethod
    def _from(cls, place: LauncherEnv) -> World:
        rank = -1 if place.rank is None else place.rank
        world_size = -1 if place.world_size is None else place.world_size
        if rank == -1 and world_size in (-1, 0, 1):
            return cls()
        rank_name, size_name, local_rank_name, local_size_name = place.names
        if rank < 0 or world_size < 1 or rank >= world_size:
            raise WorldSizeError(
                f"{rank_name}={_show(place.rank)} and {size_name}={_show(place.world_size)} (from {place.launcher}) do "
                f"not fit: a job of W processes needs both, with ranks 0 to W-1. Start with `photinus run` or "
                f"torchrun, or unset both for one process."
            )
        local_world_size = world_size if place.local_world_size is None else place.local_world_size
        local_rank = rank if place.local_rank is None else place.local_rank
        if not 0 <= local_rank < local_world_size <= world_size:
            raise WorldSizeError(
                f"{local_rank_name}={local_rank} but this host runs {local_world_size} processes of the job "
                f"({local_size_name if place.local_world_size is not None else 'no variable has the number'}, from "
                f"{place.launcher}), which has {world_size}."
            )
        host_rank = place.host_rank
        if host_rank is None:
            # Launchers fill hosts evenly and in order, or deal the ranks out (mpirun --map-by node). Some ranks have
            # the same place on their host either way; they are taken to be in order.
            hosts = -(-world_size // local_world_size)
            host_rank = rank % hosts if rank % local_world_size != local_rank else rank // local_world_size
        return cls(rank, world_size, local_rank, local_world_size, host_rank, place.launcher)


def _show(value: int | None) -> str:
    return "not set" if value is None else str(value)


def name_ranks(ranks: Sequence[object], most: int | None = None) -> str:
    """For messages: `rank 3`, or `ranks 0, 1`; of more than `most` the first ones, and how many there are."""
    more = f", ... ({len(ranks)} ranks)" if most is not None and len(ranks) > most else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:most]))}{more}"


def check_participants(world_size: int, scheduler: LauncherEnv, environ: Mapping[str, str]) -> None:
    """Refuses RANK and WORLD_SIZE of a job that has fewer members than srun or mpirun has started processes.

    Each of those processes is a rank, or a launcher of ranks (which then sets GROUP_WORLD_SIZE, the number of them).
    """
    started = scheduler.world_size or 1
    launchers = environ.get("GROUP_WORLD_SIZE", "")
    members, said_by = (int(launchers), "GROUP_WORLD_SIZE") if launchers.isdigit() else (world_size, "WORLD_SIZE")
    if members >= started:
        return
    raise WorldSizeError(
        f"{scheduler.launcher} started {started} processes ({scheduler.names[1]}={started}), but this one finds a job "
        f"of {members} ({said_by}={environ.get(said_by, 'not set')}): each would train its own model. Unset "
        f"RANK and WORLD_SIZE: then {scheduler.launcher} gives each process its rank. Or start one `photinus run` per "
        f"host. If you want separate trainings, set {env.EXPECTED_WORLD_SIZE.name}={world_size}."
    )


def check_company(environ: Mapping[str, str]) -> None:
    """Refuses a process that nobody has started as one of several, and that is inside a Slurm job of several tasks."""
    if env.EXPECTED_WORLD_SIZE.get(environ) is not None:
        return
    job = slurm_job(environ)
    if job is None or job.tasks == 1:
        return
    raise WorldSizeError(
        f"Slurm job {job.job_id} has {job.tasks} tasks, but this process was not started by srun and would train "
        f"alone, in a world of 1. Start it with `srun python ...`, or with `photinus run` for processes on this host. "
        f"If you want one process, set {env.EXPECTED_WORLD_SIZE.name}=1."
    )
