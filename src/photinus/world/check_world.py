"""Refuses a process that would train alone although others were started beside it.

The silent way to lose a night: a launcher starts four processes, each believes that it is the only one, and four models
are trained side by side, each on all of the data.
"""

from __future__ import annotations

from collections.abc import Mapping

from .. import env
from ..errors import WorldSizeError
from .launchers import Told
from .slurm import slurm_job


def check_participants(world_size: int, scheduler: Told, environ: Mapping[str, str]) -> None:
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
        f"of {members} ({said_by}={environ.get(said_by, 'not set')}): they would train side by side, each a model of "
        f"its own. Leave RANK and WORLD_SIZE unset and {scheduler.launcher} says who is who; a launcher of processes "
        f"(photinus run) is started once per host. If separate trainings are meant, set "
        f"{env.EXPECTED_WORLD_SIZE.name}={world_size}."
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
        f"If one process is meant, set {env.EXPECTED_WORLD_SIZE.name}=1."
    )
