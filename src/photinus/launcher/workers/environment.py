"""The environment variables that a worker finds: torchrun's, and the world size that the launcher means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ... import env

__all__ = ["Place", "worker_environ"]


@dataclass(frozen=True)
class Place:
    """Where one worker stands in its job, and where the store of its attempt is.

    `interface` is the network interface over which workers of several hosts meet; None for one host.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host_rank: int
    hosts: int
    master_address: str
    master_port: int
    attempt: int
    max_restarts: int
    job_id: str
    interface: str | None = None


def worker_environ(
    place: Place, base: Mapping[str, str], *, usable_cores: int, cpu_only: bool, error_file: str
) -> dict[str, str]:
    """The whole environment of one worker.

    The user's own OMP_NUM_THREADS and GLOO_SOCKET_IFNAME win; the rest of the job's variables are the launcher's
    word. Torch reads TORCHELASTIC_USE_AGENT_STORE=True as "the launcher hosts the store", so no worker listens on
    MASTER_PORT and the death of rank 0 does not take the store with it.
    """
    environ = dict(base)
    environ.update(
        {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            "GROUP_RANK": str(place.host_rank),
            "GROUP_WORLD_SIZE": str(place.hosts),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(place.rank),
            "ROLE_WORLD_SIZE": str(place.world_size),
            "MASTER_ADDR": place.master_address,
            "MASTER_PORT": str(place.master_port),
            env.ATTEMPT.name: str(place.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
            "TORCHELASTIC_RUN_ID": place.job_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": error_file,
            env.EXPECTED_WORLD_SIZE.name: str(place.world_size),
        }
    )
    environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores // place.local_world_size)))
    environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    # gloo would look for the interface of the host's name, which may not resolve or be another network's.
    interface = "lo" if place.hosts == 1 else place.interface
    if interface is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    environ.pop(env.JOB_SECRET.name, None)
    environ.pop(env.LISTEN_FD.name, None)
    environ.pop(env.STARTED_AS.name, None)
    environ.pop(env.TERMINALS.name, None)
    if cpu_only:
        environ["CUDA_VISIBLE_DEVICES"] = ""
        # Accelerate and Transformers' Trainer, unless told so, train on the CPU with one process each, in silence.
        environ.setdefault("ACCELERATE_USE_CPU", "true")
    return environ
