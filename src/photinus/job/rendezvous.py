"""The address and port at which the ranks of a job find each other, where their launcher is not ours.

torchrun and `photinus run` set MASTER_ADDR and MASTER_PORT. srun and mpirun do not, but tell each task enough that all
of them come to the same two by themselves. What is set wins, each by itself.

The port is made of the job's number and lies in 20000-32767. Every rank has to come to the same one, so nothing that
may differ between hosts takes part in it. That range lies below Linux's range of ports for outgoing connections
(32768-60999 unless /proc/sys/net/ipv4/ip_local_port_range was changed), from which one could be in use at any moment;
and jobs with near numbers, the ones that run side by side, get different ports.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import NotInitializedError
from .cgroup import text_of
from .slurm import SlurmStep
from .world import LauncherEnv, World, read_scheduler

LOWEST_PORT, PORTS = 20000, 12768
_LOOPBACK = "127.0.0.1"
_STEPS_APART = 1021  # prime: the steps of a job, and the same step of the next jobs, do not meet


class RendezvousAddress(NamedTuple):
    """The address at which the ranks connect.

    Attributes:
        address: name or IP address of rank 0's host; 127.0.0.1 when all ranks are on one host.
        port: TCP port there.
        job: identity of the job, the same on all ranks and another for each job; empty when address and port were
            given, and who listens there is the giver's affair.
        hosts: names of the job's hosts, rank 0's first, where known.
        source: where address and port come from, for people.
    """

    address: str
    port: int
    job: str = ""
    hosts: tuple[str, ...] = ()
    source: str = "MASTER_ADDR and MASTER_PORT"

    @property
    def given(self) -> bool:
        """Return whether address and port were both in the environment."""
        return not self.job


def find_rendezvous(world: World, environ: Mapping[str, str]) -> RendezvousAddress:
    """Find the address at which the ranks of this world, of more than one rank, connect.

    Raises:
        NotInitializedError: the environment does not say it; tells what to set, in the launcher's own words.
        ValueError: MASTER_PORT is no port.
    """
    address, port = environ.get("MASTER_ADDR") or None, _given_port(environ)
    if address is not None and port is not None:
        return RendezvousAddress(address, port)
    place = read_scheduler(environ)
    if place is None or place.launcher != world.launcher:
        missing = [name for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if value is None]
        raise NotInitializedError(
            f"this job has {world.world_size} processes (from {world.launcher}), but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so the ranks cannot find each other. Start with "
            f"`photinus run` or torchrun, or export the address of rank 0's host and a free port."
        )
    if place.step is not None:
        return _of_step(place.step, address, port)
    return _of_mpi(world, place, environ, address, port)


def port_of(number: int, step: int = 0) -> int:
    """The port of a step of the job with this number."""
    return LOWEST_PORT + (number + _STEPS_APART * step) % PORTS


def _of_step(step: SlurmStep, address: str | None, port: int | None) -> RendezvousAddress:
    source = "the job and step of Slurm"
    if address is None:
        if len(step.hosts) == 1 or step.local_tasks == step.tasks:
            address = _LOOPBACK
        elif step.hosts:
            address = step.hosts[0]
        else:
            raise NotInitializedError(
                f"Slurm started {step.tasks} tasks, but neither SLURM_STEP_NODELIST nor MASTER_ADDR is set, so the "
                f"ranks cannot find each other. Export MASTER_ADDR, the name of the first host, before srun."
            )
    if port is None:
        port = port_of(_as_number(step.job_id), _as_number(step.step_id))
    return RendezvousAddress(address, port, f"slurm {step.job_id}.{step.step_id}", step.hosts, source)


def _of_mpi(
    world: World, place: LauncherEnv, environ: Mapping[str, str], address: str | None, port: int | None
) -> RendezvousAddress:
    export = "-x MASTER_ADDR={}" if place.launcher == "Open MPI" else "-genv MASTER_ADDR {}"
    one_host = place.local_world_size == world.world_size
    if address is None:
        address = _LOOPBACK if one_host else _host_of_mpirun(environ)
    if address is None:
        raise NotInitializedError(
            f"{place.launcher} started {world.world_size} processes on several hosts, {world.local_world_size} of them "
            f"here, but no variable names the host of rank 0. Give it: mpirun {export.format('HOST-OF-RANK-0')} ..."
        )
    job = _job_of_mpi(environ)
    if job is None and one_host and (proxy := hydra_proxy()) is not None:
        job = f"hydra {proxy}"
    if job is None:
        if port is None:
            both = f"{export.format(address)} {export.format('PORT').replace('MASTER_ADDR', 'MASTER_PORT')}"
            raise NotInitializedError(
                f"{place.launcher} started {world.world_size} processes, but did not set a job number, from which "
                f"to choose a port. Give a free port: mpirun {both} ..."
            )
        job = f"port {port}"
    if port is None:
        port = port_of(int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "big"))
    return RendezvousAddress(address, port, f"mpi {job}", (), f"the host and the job of {place.launcher}")


def _job_of_mpi(environ: Mapping[str, str]) -> str | None:
    """Return a name of the job that is equal in all its processes, and differs from other jobs'."""
    # PMIX_NAMESPACE of Open MPI 4 is a number, of 5 prterun-HOST-PID@JOB.
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"):
        if environ.get(name):
            return environ[name]
    return None


def _host_of_mpirun(environ: Mapping[str, str]) -> str | None:
    """The host on which mpirun runs: with the usual host files also that of rank 0."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # 3942580224.0;tcp://10.0.0.1,192.168.1.1:43817
    match = re.search(r"tcp6?://(\[[^]]+\]|[^:;[]+)", uri)
    if match is not None:
        return match[1].split(",")[0].strip("[]")
    match = re.match(r"prterun-(.+)-\d+@\d+\Z", environ.get("PMIX_NAMESPACE", ""))
    return match[1] if match is not None else None


def _given_port(environ: Mapping[str, str]) -> int | None:
    text = environ.get("MASTER_PORT")
    if not text:
        return None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(f"MASTER_PORT={text!r}: needs a port, a number from 1 to 65535")
    return int(text)


def _as_number(text: str) -> int:
    return int(text) if text.isdigit() else int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


_PROXY = "hydra_pmi_proxy"  # one on each host for each run of mpiexec, an ancestor of all that it starts there
_GENERATIONS = 64


def hydra_proxy(pid: int | str = "self", root: Path = Path("/proc")) -> int | None:
    """The process id of the proxy that started this process, alike for all ranks of its host; None without one."""
    for _ in range(_GENERATIONS):
        number, _, rest = text_of(root / str(pid) / "stat").partition(" (")
        if not rest:  # /proc is not there, or hides other users' processes
            return None
        name, _, fields = rest.rpartition(") ")
        if name == _PROXY:
            return int(number)
        pid = int(fields.split()[1])
        if pid <= 1:
            return None
    return None
