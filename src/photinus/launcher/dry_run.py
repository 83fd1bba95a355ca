"""What `photinus run --dry-run` says: which processes would be started, and what each would find in its environment."""

from __future__ import annotations

import os
import shlex
import socket
import sys

from .environment import Place, worker_environ
from .job import Job

__all__ = ["told"]

_CHOSEN_LATER = "chosen when it starts"


def told(job: Job) -> str:
    """The job as text: the command, what all workers share, and what is each one's own."""
    program = job.program
    python = {"script": [sys.executable], "module": [sys.executable, "-m"], "program": []}[program.kind]
    command = [*python, program.target, *program.arguments]
    own = []
    for rank in range(job.local_world_size):
        place = Place(
            rank=rank,
            world_size=job.local_world_size,
            local_rank=rank,
            local_world_size=job.local_world_size,
            host_rank=0,
            hosts=1,
            master_address="127.0.0.1",
            master_port=0,
            attempt=0,
            max_restarts=job.max_restarts,
            job_id=job.job_id,
        )
        environ = worker_environ(
            place, job.environ, usable_cores=job.usable_cores, cpu_only=job.cpu_only, error_file=_CHOSEN_LATER
        )
        environ |= {"MASTER_PORT": _CHOSEN_LATER, "TORCHELASTIC_RUN_ID": _CHOSEN_LATER}
        own.append({name: value for name, value in environ.items() if os.environ.get(name) != value or _ours(name)})
    shared = {name: value for name, value in own[0].items() if all(each.get(name) == value for each in own)}
    count = f"{job.local_world_size} worker{'s' * (job.local_world_size != 1)}"
    lines = [
        f"{count} on {socket.gethostname()}, in {os.getcwd()}:",
        f"  {shlex.join(command)}",
        f"restarted at most {job.max_restarts} time{'s' * (job.max_restarts != 1)} when one fails",
        "",
        "in the environment of all:",
        *(f"  {name}={value}" for name, value in sorted(shared.items())),
        "",
        "and of each:",
    ]
    for each in own:
        lines.append("  " + " ".join(f"{name}={value}" for name, value in sorted(each.items()) if name not in shared))
    return "\n".join(lines)


def _ours(name: str) -> bool:
    return name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
