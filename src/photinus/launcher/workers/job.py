"""A job as decided before anything starts, and one attempt at it: who takes part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..command_line.program import Program
from .environment import Place, worker_environ
from .store import LOOPBACK

__all__ = ["Formation", "Job"]


@dataclass(frozen=True)
class Formation:
    """One attempt: who takes part.

    Attributes:
        workers: number of workers of each host, in the order of the hosts' ranks.
        host_rank: this host's place among them.
        attempt: 0 for the first start; counts every start, also those for hosts that came or went.
        job_id: the same on all hosts.
        store_port: where this host's workers find the attempt's store, at 127.0.0.1.
        interface: over which workers of several hosts meet; None for one host, or when it is not known.
    """

    workers: tuple[int, ...]
    host_rank: int
    attempt: int
    job_id: str
    store_port: int
    interface: str | None = None

    @property
    def first_rank(self) -> int:
        """Rank of this host's first worker."""
        return sum(self.workers[: self.host_rank])

    @property
    def world_size(self) -> int:
        """Workers of all hosts."""
        return sum(self.workers)


@dataclass(frozen=True)
class Job:
    """What to run and how.

    Attributes:
        local_world_size: workers on this host.
        stop_grace_s: seconds between SIGTERM and SIGKILL for workers that are asked to leave.
        interrupt_grace_s: the same where somebody sits waiting at a keyboard.
        usable_cores: for the default of OMP_NUM_THREADS.
        base_environ: the launcher's environment, which the workers inherit.
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
    base_environ: Mapping[str, str]
    preempt_after_s: float | None = None
    gpus: tuple[str, ...] = ()
    temporary: str = ""

    def environ(self, formation: Formation, local_rank: int, error_file: str) -> dict[str, str]:
        """The whole environment of a worker in an attempt, which writes about its end into `error_file`."""
        place = Place(
            rank=formation.first_rank + local_rank,
            world_size=formation.world_size,
            local_rank=local_rank,
            local_world_size=self.local_world_size,
            host_rank=formation.host_rank,
            hosts=len(formation.workers),
            master_address=LOOPBACK,
            master_port=formation.store_port,
            attempt=formation.attempt,
            max_restarts=self.max_restarts,
            job_id=formation.job_id,
            interface=formation.interface,
        )
        return worker_environ(
            place, self.base_environ, usable_cores=self.usable_cores, cpu_only=self.cpu_only, error_file=error_file
        )
