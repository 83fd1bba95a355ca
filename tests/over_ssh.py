"""A job on two hosts, typed on the first: the second is reached over ssh. Both are network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.dist.test_run import Ended, script
from tests.netns import NetworkHost, network_hosts
from tests.sshd import SshServer, ssh_server

DEADLINE_S = 120.0
REPORT = """
import json, os, socket, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK PHOTINUS_WORLD_SIZE MASTER_ADDR"
report = {name: os.environ.get(name) for name in names.split()}
report["host"] = socket.gethostname()
report["argv"] = sys.argv[1:]
report["cwd"] = os.getcwd()
report["stdin"] = os.readlink("/proc/self/fd/0")
report["mine"] = os.environ.get("MINE")
report["deepspeed"] = os.environ.get("FROM_FILE")
report["devices"] = os.environ.get("CUDA_VISIBLE_DEVICES")
report["secret"] = [name for name in os.environ if "SECRET" in name]
if "gloo" in sys.argv:
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    report["total"] = total.item()
    dist.barrier()
    dist.destroy_process_group()
print(json.dumps(report), flush=True)
"""
# Notes its pid and its child's, then stays.
STAY = """
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
Path(sys.argv[1], f"pids-{os.environ['RANK']}").write_text(f"{os.getpid()} {child.pid}")
time.sleep(1000)
"""


@dataclass(frozen=True)
class Place:
    """Two hosts; the second is reached over ssh from the first, where the user types."""

    first: NetworkHost
    second: NetworkHost
    server: SshServer
    folder: Path

    def hostfile(self, text: str) -> Path:
        path = self.folder / "hosts"
        path.write_text(text)
        return path

    def start(self, *words: str | Path, ssh: str = "", **environ: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "photinus", "run", "--ssh", ssh or self.server.ssh, *words]
        return self.first.start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        )

    def run(self, *words: str | Path, ssh: str = "", **environ: str) -> Ended:
        return finish(self.start(*words, ssh=ssh, **environ))


def finish(process: subprocess.Popen[str]) -> Ended:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the job did not end in time\n{out}\n{err}") from None
    return Ended(process.returncode, out, err)


@contextlib.contextmanager
def two_hosts(folder: Path, more: str = "") -> Iterator[Place]:
    """The hosts; `more`: further lines of the server's configuration."""
    keys = folder / "keys"
    keys.mkdir()
    with network_hosts(2) as (first, second), ssh_server(keys, host=second, more=more) as server:
        yield Place(first, second, server, folder)


def reports(ended: Ended) -> dict[int, dict]:
    found = {}
    for line in ended.out.splitlines():
        mark, brace, rest = line.partition("{")
        if brace:
            report = json.loads(brace + rest)
            rank = int(report["RANK"])
            assert mark == "" if rank == 0 else re.fullmatch(rf"\[\S+:{rank}\] ", mark)
            found[rank] = report
    return found


def start_staying(place: Place, text: str = STAY, *flags: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A running job of one rank on each host, and the pids of ranks and their children."""
    hosts = place.hostfile("host-0 slots=1\nhost-1 slots=1\n")
    process = place.start("--hostfile", hosts, "--max-restarts", "0", *flags, script(place.folder, text), place.folder)
    files = [place.folder / f"pids-{rank}" for rank in range(2)]
    deadline = time.monotonic() + DEADLINE_S
    while not all(file.exists() and file.stat().st_size for file in files):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"the job did not start\n{out}\n{err}")
        time.sleep(0.01)
    return process, [int(pid) for file in files for pid in file.read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone_within(pids: list[int], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"left: {[(pid, words_of(pid)) for pid in pids if alive(pid)]}"
        time.sleep(0.01)


def assert_only_the_server_is_left(place: Place, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        left = [pid for host in (place.first, place.second) for pid in host.pids() if pid != place.server.process.pid]
        if not [pid for pid in left if alive(pid)]:
            return
        assert time.monotonic() < deadline, [words_of(pid) for pid in left]
        time.sleep(0.05)


def words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def environ_of(pid: int) -> dict[str, str]:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
