"""A job as decided before anything starts: what the command line, the devices and the environment come to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..command_line.program import Program

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """What to run and how.

    Attributes:
        program: the script or module of the user.
        job_id: identity of this job, in the workers' TORCHELASTIC_RUN_ID.
        local_world_size: workers on this host.
        max_restarts: attempts after the first.
        stop_grace_s: seconds between SIGTERM and SIGKILL for workers that are asked to leave.
        interrupt_grace_s: the same where somebody sits waiting at a keyboard.
        usable_cores: for the default of OMP_NUM_THREADS.
        cpu_only: hide GPUs from the workers.
        environ: the launcher's environment, which the workers inherit.
        preempt_after_s: a trial: ask the workers to suspend after so long, once.
        gpus: the name of each worker's GPU, by local rank; empty where there are none.
        temporary: folder of the job, see `worker.use_folder`; empty where there is none.
    """

    program: Program
    job_id: str
    local_world_size: int
    max_restarts: int
    stop_grace_s: float
    interrupt_grace_s: float
    usable_cores: int
    cpu_only: bool
    environ: Mapping[str, str]
    preempt_after_s: float | None = None
    gpus: tuple[str, ...] = ()
    temporary: str = ""
