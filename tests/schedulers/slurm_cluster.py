"""A Slurm cluster of two hosts on this machine, for as long as a test needs it.

One munged, one slurmctld and two slurmd, all in the foreground as children of the test, with everything that they write
in one temporary folder. Nothing of the machine's own Slurm or munge, if there is one, is used or changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Cluster", "Ran", "slurm_cluster", "why_no_slurm"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
_UP_S = 60.0
_DOWN_S = 15.0
_SBIN = "/usr/sbin"

_CONF = """\
ClusterName=photinus-test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
MinJobAge=60
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000
PartitionName=all Nodes=node1,node2 Default=YES MaxTime=10 State=UP OverSubscribe=YES:4
"""


def why_no_slurm() -> str | None:
    """Why no cluster can be started here; None when it can."""
    missing = [name for name in _PROGRAMS if _which(name) is None]
    if missing:
        return f"needs Slurm and munge (Debian: apt-get install slurm-wlm munge); missing: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "slurmd starts tasks as their users, so it has to be root"
    return None


@dataclass(frozen=True)
class Ran:
    """A command of Slurm's that has ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


class Cluster:
    """A running cluster: `run` starts Slurm's commands against it."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self.environ = dict(environ)

    def run(
        self, *words: str | Path, cwd: Path | None = None, timeout_s: float = 120.0, text: str = "", **environ: str
    ) -> Ran:
        """Runs a command to its end; AssertionError with all logs when it does not end in time."""
        process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**self.environ, **environ},
        )
        try:
            out, err = process.communicate(text, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            self.cancel_all()
            raise AssertionError(f"{words} did not end in time\n{out}\n{err}\n{self.logs()}") from None
        return Ran(process.returncode, out, err)

    def wait_for(self, job: str, *states: str, timeout_s: float = 120.0) -> dict[str, str]:
        """Waits until the job is in one of these states (COMPLETED, FAILED, ...); what scontrol says of it then."""
        deadline = time.monotonic() + timeout_s
        while True:
            told = dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", job).out))
            if told.get("JobState") in states:
                return told
            if time.monotonic() > deadline:
                self.cancel_all()
                raise AssertionError(f"job {job} is {told.get('JobState')}, and not {states}\n{told}\n{self.logs()}")
            time.sleep(0.2)

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
        """Waits until the condition holds; AssertionError with all logs when it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                self.cancel_all()
                raise AssertionError(f"it was awaited in vain that {what}\n{self.logs()}")
            time.sleep(0.1)

    def cancel_all(self) -> None:
        """Ends whatever runs."""
        subprocess.run(["scancel", "--user=root"], env=self.environ, capture_output=True, timeout=30, check=False)

    def logs(self) -> str:
        """The last lines of what the daemons wrote."""
        return "\n".join(f"----- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """Starts the cluster and, at the end, leaves no process, port or file of it behind."""
    folder = Path(tempfile.mkdtemp(prefix="photinus-slurm-"))
    daemons: list[subprocess.Popen[bytes]] = []
    cluster = Cluster(folder, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"})
    try:
        # Only the root of this machine can be in the folder, but munged wants nobody else to be able to write there.
        folder.chmod(0o755)
        for name in ("munge", "state", "spool.node1", "spool.node2"):
            (folder / name).mkdir(mode=0o755)
        key = folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        (folder / "slurm.conf").write_text(
            _CONF.format(folder=folder, host=socket.gethostname().partition(".")[0], ports=_free_ports(3))
        )
        munge = [
            f"--{name}={folder}/munge/{name.partition('-')[0]}"
            for name in ("socket", "key-file", "pid-file", "seed-file")
        ]
        daemons.append(_start(folder, "munged", "--foreground", "--force", *munge, f"--log-file={folder}/munged.log"))
        _until(lambda: (folder / "munge" / "socket").exists(), "munged listens", cluster)
        daemons.append(_start(folder, "slurmctld", "-D", "-i", "-f", str(folder / "slurm.conf")))
        for node in ("node1", "node2"):
            daemons.append(_start(folder, "slurmd", "-D", "-N", node, "-f", str(folder / "slurm.conf")))
        _until(lambda: _idle(cluster) == 2, "both hosts are idle", cluster, daemons)
        yield cluster
        cluster.cancel_all()
        _until(lambda: not cluster.run("squeue", "--noheader").out.strip(), "no job is left", cluster)
    finally:
        for daemon in reversed(daemons):
            _end(daemon)
        shutil.rmtree(folder, ignore_errors=True)


def _idle(cluster: Cluster) -> int:
    told = cluster.run("sinfo", "--noheader", "--Node", "--format=%T")
    return sum(line.strip() == "idle" for line in told.out.splitlines())


def _start(folder: Path, program: str, *words: str) -> subprocess.Popen[bytes]:
    path = _which(program)
    assert path is not None
    with open(folder / f"{program}.{len(list(folder.glob('*.out.log')))}.out.log", "wb") as log:
        return subprocess.Popen(
            [path, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "SLURM_CONF": str(folder / "slurm.conf")},
        )


def _end(daemon: subprocess.Popen[bytes]) -> None:
    if daemon.poll() is None:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(_DOWN_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(daemon.pid, signal.SIGKILL)


def _until(
    condition: Callable[[], object], what: str, cluster: Cluster, daemons: Sequence[subprocess.Popen[bytes]] = ()
) -> None:
    deadline = time.monotonic() + _UP_S
    while not condition():
        dead = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if dead or time.monotonic() > deadline:
            raise AssertionError(f"it was awaited in vain that {what}; ended: {dead}\n{cluster.logs()}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has now. Slurm wants numbers in its file, so a race with others cannot be excluded."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _which(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path=_SBIN)
