"""kill -9 of a worker, the launcher, or both, at random moments: nothing is left, and the right rank is named."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
import uuid
from pathlib import Path

import pytest

from tests.dist.test_run import DEADLINE_S, RunningJob, script
from tests.dist.test_run_hosts import free_port
from tests.worker_processes import rank_of

pytestmark = pytest.mark.slow
MARK = "PHOTINUS_TEST_MARK"
KILLS_EACH = 34
# Each rank has a child that does not listen to SIGTERM, as a data loader that hangs.
PLAIN = """
import os, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
subprocess.Popen([sys.executable, "-c", deaf])
time.sleep(1000)
"""
TRAINING = """
import time, torch, torch.distributed as dist
dist.init_process_group("photinus")
while True:
    dist.all_reduce(torch.ones(1000))
    time.sleep(0.001)
"""


def marked(mark: str) -> dict[int, dict[str, str]]:
    """The living processes of a job, by pid, with their environments (as they were started)."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={mark}" in environ and state not in "ZX":
            found[int(folder.name)] = dict(word.partition("=")[::2] for word in environ)
    return found


def workers(mark: str) -> dict[int, int]:
    """Rank by pid of the workers that run."""
    ranks = {pid: rank_of(pid) for pid in marked(mark)}
    return {pid: rank for pid, rank in ranks.items() if rank is not None}


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def assert_nothing_is_left(mark: str, folder: Path, seed: int) -> None:
    deadline = time.monotonic() + 5.0
    while left := marked(mark):
        assert time.monotonic() < deadline, f"seed {seed}: left: {[command(pid) for pid in left]}"
        time.sleep(0.01)
    assert list(folder.iterdir()) == [], f"seed {seed}: files are left"


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return str(pid)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("victim", ["worker", "launcher", "both"])
def test_random_kills_leave_nothing_and_name_the_right_rank(tmp_path, victim):
    plain, training = script(tmp_path, PLAIN, "plain.py"), script(tmp_path, TRAINING, "training.py")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    for seed in range(KILLS_EACH):
        chance = random.Random(f"{victim} {seed}")
        trains, several = seed % 4 == 0, seed % 3 == 0
        mark = uuid.uuid4().hex
        flags = ["--cpu", "--max-restarts", "0", "--stop-grace", "0.5"]
        path, environ = training if trains else plain, {MARK: mark, "TMPDIR": str(temporary)}
        jobs = []
        if several:
            flags += ["--rdzv-conf", "join_timeout=20"]  # a leader that was killed before it led never comes
            flags += ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
            for rank in "01":
                words = [*flags, "--node-rank", rank, "--nproc-per-node", "1", path]
                jobs.append(RunningJob(words, **environ))
        else:
            jobs.append(RunningJob([*flags, "--nproc-per-node", "2", path], **environ))
        try:
            named = strike(jobs, victim, mark, chance, seed, longest_s=4.0 if trains else 1.0)
            for end in [job.end() for job in jobs]:
                if victim == "worker":
                    assert end.code == 128 + signal.SIGKILL, f"seed {seed}: {end}"
                    blamed = re.findall(
                        r"^photinus: (rank \d+ \(pid \d+\)) was killed by SIGKILL", end.err, re.MULTILINE
                    )
                    assert blamed == [named], f"seed {seed}: {end.err}"
            assert_nothing_is_left(mark, temporary, seed)
        finally:
            for pid in marked(mark):
                kill(pid)


def strike(
    jobs: list[RunningJob], victim: str, mark: str, chance: random.Random, seed: int, *, longest_s: float
) -> str:
    """Kills at a random moment; returns the rank and pid of a killed worker as the launcher is to write them."""
    launcher = chance.choice(jobs)
    if victim == "launcher":
        # Any moment counts: while Python starts, while torch is imported, while workers run.
        time.sleep(chance.uniform(0.0, longest_s + 4.0))
        kill(launcher.process.pid)
        return ""
    deadline = time.monotonic() + DEADLINE_S
    while len(workers(mark)) < 2:
        assert time.monotonic() < deadline, f"seed {seed}: two workers never ran"
        time.sleep(0.01)
    time.sleep(chance.uniform(0.0, longest_s))
    pid, rank = chance.choice(sorted(workers(mark).items()))
    kill(pid)
    if victim == "both":
        kill(launcher.process.pid)
    return f"rank {rank} (pid {pid})"
