"""A step of Slurm's srun as one of its tasks sees it, and what the job around it asked for."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

_MOST_HOSTS = 100_000
_NUMBERS = r"\d+(?:-\d+)?"
_NAME = re.compile(rf"(?:[^\s,[\]]|\[{_NUMBERS}(?:,{_NUMBERS})*\])+")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The host names that a Slurm node list stands for, in its order.

    Any number of bracketed parts in a name are understood, the last one running fastest: "r[1-2]n[1-2]" is r1n1, r1n2,
    r2n1, r2n2. The width of a range's first number is kept: [08-10] is 08, 09, 10.

    Raises:
        ValueError: the text is no such list, or stands for more than 100,000 hosts.
    """
    names: list[str] = []
    for item in re.split(r",(?![^[]*\])", text):  # commas outside of brackets
        if _NAME.fullmatch(item.strip()) is None:
            raise ValueError(f"host list {_short(text)}: {item.strip()!r} is not a name like a or node[1-3,7]")
        parts = re.split(r"\[(.*?)\]", item.strip())  # in turn a text and what is in brackets
        choices = [_expand(part) if number % 2 else [part] for number, part in enumerate(parts)]
        count = math.prod(map(len, choices))
        if not 0 < count <= _MOST_HOSTS - len(names):
            raise ValueError(f"host list {_short(text)} has an empty range, or more than {_MOST_HOSTS} hosts")
        names += map("".join, itertools.product(*choices))
    return tuple(names)


def _expand(numbers: str) -> Sequence[str]:
    found: list[str] = []
    for word in numbers.split(","):
        low, _, high = word.partition("-")
        last = min(int(high or low), int(low) + _MOST_HOSTS)  # one too many are refused
        found += [str(number).zfill(len(low)) for number in range(int(low), last + 1)]
    return found


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


T = TypeVar("T")

# Slurm runs the batch script and the shell of salloc as steps of their own, with these numbers: no srun of the user's.
_NOT_BY_SRUN = frozenset({"4294967290", "4294967291", "4294967292", "4294967293", "batch", "interactive", "extern"})
_MOST_TASKS = 10_000_000


class SlurmStep(NamedTuple):
    """The variables that srun sets for each task.

    Attributes:
        job_id: of the job; each element of a job array has its own.
        step_id: counts the calls of srun in the job, from 0.
        rank, tasks: this task, and how many there are.
        local_rank, local_tasks: the same on this host; local_tasks is None where Slurm does not say.
        host_rank: this host among those of the step.
        hosts: their names, in the order of the ranks; empty where Slurm does not say.
        tasks_per_host: tasks on each of them; empty where Slurm does not say.
    """

    job_id: str
    step_id: str
    rank: int
    tasks: int
    local_rank: int
    local_tasks: int | None
    host_rank: int
    hosts: tuple[str, ...]
    tasks_per_host: tuple[int, ...]


class SlurmJob(NamedTuple):
    """The request of a job, as a process inside it sees it, with srun or without.

    Attributes:
        job_id: of the job.
        tasks: how many; 1 where it did not say.
        hosts: how many.
    """

    job_id: str
    tasks: int
    hosts: int


def slurm_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """The step of srun that this process is a task of; None outside of srun, also in a batch script's own shell.

    Raises:
        ValueError: a variable of Slurm holds what cannot be read; names it.
    """
    step_id = environ.get("SLURM_STEP_ID", "")
    if not step_id or step_id in _NOT_BY_SRUN or "SLURM_PROCID" not in environ:
        return None
    # The step's own numbers: SLURM_NTASKS and its like may still be those of the job around it.
    tasks = whole_number(environ, "Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if tasks is None:
        raise ValueError(f"srun started step {step_id}, but neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS is set")
    host_rank = whole_number(environ, "Slurm", "SLURM_NODEID") or 0
    per_host = _read(environ, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), tasks_per_host)
    if sum(per_host) != tasks or host_rank >= len(per_host):
        per_host = ()
    rank = whole_number(environ, "Slurm", "SLURM_PROCID") or 0
    local_rank = whole_number(environ, "Slurm", "SLURM_LOCALID")
    return SlurmStep(
        job_id=environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or "0",
        step_id=step_id,
        rank=rank,
        tasks=tasks,
        local_rank=rank if local_rank is None else local_rank,
        local_tasks=per_host[host_rank] if per_host else None,
        host_rank=host_rank,
        hosts=_read(environ, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"), expand_hosts),
        tasks_per_host=per_host,
    )


def slurm_job(environ: Mapping[str, str]) -> SlurmJob | None:
    """The job that this process is inside of, by sbatch, salloc or srun; None outside of Slurm.

    Raises:
        ValueError: a variable of Slurm holds what cannot be read; names it.
    """
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job_id:
        return None
    hosts = whole_number(environ, "Slurm", "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
    per_host = _read(environ, ("SLURM_TASKS_PER_NODE",), tasks_per_host)
    tasks = whole_number(environ, "Slurm", "SLURM_NTASKS", "SLURM_NPROCS")
    if tasks is None and (each := whole_number(environ, "Slurm", "SLURM_NTASKS_PER_NODE")) is not None:
        tasks = each * hosts
    # Without a number of tasks, TASKS_PER_NODE counts the cores: nobody asked for so many processes.
    return SlurmJob(job_id, tasks=tasks or 1, hosts=max(hosts, len(per_host)))


def tasks_per_host(text: str) -> tuple[int, ...]:
    """Reads Slurm's tasks per node: "2(x3),1" is 2, 2, 2, 1.

    Raises:
        ValueError: it is no such list.
    """
    counts: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word.strip())
        times = int(match[2] or 1) if match else 0
        if match is None or times > _MOST_TASKS:
            raise ValueError(f"{word.strip()!r} is not a number of tasks like 4 or 2(x3)")
        counts += [int(match[1])] * times
    return tuple(counts)


def has_a_gpu_of_its_own(environ: Mapping[str, str]) -> bool:
    """Return whether each task sees its own GPUs, from 0 (--gpus-per-task, --gpu-bind)."""
    bound = environ.get("SLURM_GPU_BIND", "").removeprefix("verbose,").removeprefix("quiet,")
    if bound:
        return bound.startswith(("single", "per_task", "map_gpu", "mask_gpu"))
    return bool(environ.get("SLURM_GPUS_PER_TASK")) or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")


def reachable_address(host: str) -> str:
    """The name itself where it resolves; else the address that Slurm's own configuration has for the host.

    Clusters whose compute nodes are in no name server have NodeAddr in slurm.conf, which `scontrol` tells.
    """
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        pass
    else:
        return host
    if shutil.which("scontrol") is None:
        return host
    try:
        result = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", host], capture_output=True, text=True, timeout=10.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return host
    match = re.search(r"\bNodeAddr=(\S+)", result.stdout)
    return match[1] if match else host


def whole_number(environ: Mapping[str, str], launcher: str, *names: str) -> int | None:
    """The first of these variables of a launcher that is set, as a number; None when none is.

    Raises:
        ValueError: it is not a whole number.
    """
    for name in names:
        if text := environ.get(name):
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"{name}={text!r} (from {launcher}) is not a whole number") from None
    return None


def _read(environ: Mapping[str, str], names: Sequence[str], parse: Callable[[str], tuple[T, ...]]) -> tuple[T, ...]:
    """The first of these variables that is set, parsed; empty when none is."""
    for name in names:
        if text := environ.get(name):
            try:
                return parse(text)
            except ValueError as error:
                raise ValueError(f"{name}={text!r} (from Slurm) cannot be read: {error}") from None
    return ()
