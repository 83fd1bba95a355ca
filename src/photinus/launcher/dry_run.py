"""What `photinus run --dry-run` says: which processes would be started, and what each would find in its environment."""

from __future__ import annotations

import os
import shlex
import socket
import sys

from .command_line.flags import HostFlags
from .workers.job import Formation, Job
from .workers.logs import Logs

__all__ = ["dry_run_text"]

_CHOSEN_LATER = "chosen when it starts"


def dry_run_text(job: Job, hosts: HostFlags, logs: Logs) -> str:
    """The job as text: the command, what all workers share, and what is each one's own.

    With several hosts the ranks are known only for the first, unless the hosts run equally many workers.
    """
    least, most = hosts.nnodes or (1, 1)
    host_rank = hosts.node_rank or 0
    program = job.program
    python = {"script": [sys.executable], "module": [sys.executable, "-m"], "program": []}[program.kind]
    command = [*python, program.target, *program.arguments_of("LOCAL_RANK")]
    own = []
    formation = Formation((job.local_world_size,) * most, host_rank, 0, job.job_id, 0)
    for rank in range(job.local_world_size):
        environ = job.environ(formation, rank, _CHOSEN_LATER)
        environ |= {"MASTER_PORT": _CHOSEN_LATER, "TORCHELASTIC_RUN_ID": _CHOSEN_LATER}
        own.append({name: value for name, value in environ.items() if os.environ.get(name) != value or _ours(name)})
    shared = {name: value for name, value in own[0].items() if all(each.get(name) == value for each in own)}
    lines = []
    if most > 1:
        lines = [
            f"{most if least == most else f'{least} to {most}'} hosts, which are numbered "
            + ("by --node-rank" if hosts.node_rank is not None else "as they come")
            + f"; this one as number {host_rank}, if {most} of them run as many workers:"
        ]
    count = f"{job.local_world_size} worker{'s' * (job.local_world_size != 1)}"
    lines += [
        f"{count} on {socket.gethostname()}, in {os.getcwd()}:",
        f"  {shlex.join(command)}",
        f"restarted at most {job.max_restarts} time{'s' * (job.max_restarts != 1)} when one fails",
        *([logs.describe()] if logs.writes else []),
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
