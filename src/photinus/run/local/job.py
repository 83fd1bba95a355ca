"""A job as decided before anything starts, and the environment variables that a worker of an attempt finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ... import env
from ...job.attempt import AttemptMembers
from ...job.spec import JobSpec
from ...process_memory import HUGE_HEAP, use_huge_pages
from .devices import usable_cores

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Job:
    """A job as the user asked for it (`spec`), with the facts that were found since.

    Attributes:
        local_world_size: workers on this host; 0: not known yet.
        base_environ: the launcher's environment, which the workers inherit.
        gpus: the name of each worker's GPU, by local rank; empty where there are none.
        temporary: folder of the job, see `worker.use_folder`; empty where there is none.
        images: paths of the snapshots' memory files, by local rank; empty where there can be none.
        out: the run that the attempt before was in, see `status`.
        notes: lines for people, to be printed before the workers start.
    """

    spec: JobSpec
    job_id: str
    local_world_size: int
    base_environ: Mapping[str, str]
    gpus: tuple[str, ...] = ()
    temporary: str = ""
    images: tuple[tuple[str, ...], ...] = ()
    out: str = ""
    notes: tuple[str, ...] = ()

    def environ(self, members: AttemptMembers, local_rank: int) -> dict[str, str]:
        """Return the environment of a worker in an attempt, but for what names its files (see `job.worker_files`).

        The user's own OMP_NUM_THREADS, THP_MEM_ALLOC_ENABLE and GLOO_SOCKET_IFNAME win; the rest of the job's variables
        are the launcher's word. Torch reads TORCHELASTIC_USE_AGENT_STORE=True as "the launcher hosts the store", so no
        worker listens on MASTER_PORT and the death of rank 0 does not take the store with it.
        """
        rank, world_size = members.first_rank + local_rank, members.world_size
        hosts, local_world_size = len(members.workers), members.workers[members.host_rank]
        environ = dict(self.base_environ)
        if env.EXPECTED_WORLD_SIZE.name in environ and environ.get("GLOO_SOCKET_IFNAME") == "lo":
            del environ["GLOO_SOCKET_IFNAME"]  # set by the launcher of a worker in which this one runs
        environ.update(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(local_world_size),
                "GROUP_RANK": str(members.host_rank),
                "GROUP_WORLD_SIZE": str(hosts),
                "ROLE_NAME": self.spec.role,
                "ROLE_RANK": str(rank),
                "ROLE_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(members.store_port),
                env.ATTEMPT.name: str(members.attempt),
                "TORCHELASTIC_RESTART_COUNT": str(members.restarts),
                "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
                "TORCHELASTIC_MAX_RESTARTS": str(self.spec.max_restarts),
                "TORCHELASTIC_RUN_ID": members.job_id,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                env.EXPECTED_WORLD_SIZE.name: str(world_size),
            }
        )
        environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // local_world_size)))
        environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        if not self.gpus:
            use_huge_pages(environ)
            if environ.get("THP_MEM_ALLOC_ENABLE") == "1":  # the same pages for smaller tensors
                environ.setdefault("GLIBC_TUNABLES", HUGE_HEAP)
        # gloo would look for the interface of the host's name, which may not resolve or be another network's.
        if (interface := "lo" if hosts == 1 else members.interface) is not None:
            environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        environ.pop(env.JOB_SECRET.name, None)
        if self.spec.cpu:
            environ["CUDA_VISIBLE_DEVICES"] = ""
            # Accelerate and Transformers' Trainer, unless told so, train on the CPU with one process each, in silence.
            environ.setdefault("ACCELERATE_USE_CPU", "true")
        return environ
