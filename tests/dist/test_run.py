"""`photinus run`: what each process sees, and how a job that goes well ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from photinus.run.local.devices import usable_cores

DEADLINE_S = 120.0
# By which the launcher sees that a script's training has begun.
ONE_STEP = """
import torch
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
"""


@dataclass(frozen=True)
class Ended:
    """A job that has ended: its exit code (minus a signal that killed the launcher) and what it printed."""

    code: int
    out: str
    err: str


class RunningJob:
    """`photinus run` in the background. Ends in time or is killed; on failure shows what it printed."""

    started: ClassVar[list[RunningJob]] = []

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        stderr: int = subprocess.PIPE,
        prepare: Callable[[], object] | None = None,
        **environ: str,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "photinus", "run", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            preexec_fn=prepare,
        )
        self.started.append(self)

    @classmethod
    def kill_all(cls) -> None:
        """Ends the jobs of a test that failed before it had waited for them."""
        while cls.started:
            job = cls.started.pop()
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGTERM)  # the launcher ends its workers
                try:
                    job.process.wait(10)
                except subprocess.TimeoutExpired:
                    job.process.kill()
                    job.process.wait()

    def wait_for(self, *files: Path) -> None:
        """Until all of these files exist and hold something."""
        deadline = time.monotonic() + DEADLINE_S
        while not all(file.exists() and file.stat().st_size for file in files):
            if self.process.poll() is not None or time.monotonic() > deadline:
                ended = self.end(kill=True)
                raise AssertionError(f"{files} were awaited in vain\n{ended.out}\n{ended.err}")
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, *, kill: bool = False) -> Ended:
        """Waits for the end. stdout and stderr are read to their ends, so no process may have kept them open."""
        if kill:
            self.process.kill()
        try:
            out, err = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"the job did not end in time\n{out}\n{err}") from None
        return Ended(self.process.returncode, out, err)


def run_job(*words: str | Path, cwd: Path | None = None, **environ: str) -> Ended:
    return RunningJob(words, cwd=cwd, **environ).end()


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


REPORT = """
import json, os, sys
from pathlib import Path
def listeners(pid, port=None):
    '''Local addresses on which a process listens for TCP; or at which somebody listens on a port.'''
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
        except FileNotFoundError:
            pass
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, number = fields[1].split(":")
            if fields[3] == "0A" and (fields[9] in inodes if port is None else int(number, 16) == port):
                found.append(address)
    return found
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR TORCHELASTIC_RESTART_COUNT"
report = {name: os.environ[name] for name in [*names.split(), "PHOTINUS_WORLD_SIZE"]}
report["argv"] = sys.argv
report["threads"] = os.environ["OMP_NUM_THREADS"]
report["name"] = __name__
report["store_listens_on"] = listeners(os.getpid(), int(os.environ["MASTER_PORT"]))
report["launcher_listens_on"] = listeners(os.getppid())
if "gloo" in sys.argv:
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    report["total"] = total.item()
    report["worker_listens_on"] = listeners(os.getpid())
    dist.barrier()
    dist.destroy_process_group()
print(json.dumps(report))
print("a line on stderr", file=sys.stderr)
"""
LOOPBACK = "0100007F"


def reports(ended: Ended) -> dict[int, dict]:
    """What REPORT printed, by rank; rank 0 without a mark, the others with theirs."""
    found = {}
    for line in ended.out.splitlines():
        mark, _, text = line.partition(" ") if line.startswith("[") else ("[0]", "", line)
        report = json.loads(text)
        assert mark == f"[{report['RANK']}]"
        found[int(report["RANK"])] = report
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_process_finds_its_place_and_its_arguments(tmp_path, world_size):
    path = script(tmp_path, REPORT)
    arguments = ("gloo",) if world_size == 2 else ("--lr", "0.1", "--", "--nproc-per-node", "a b")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    ended = run_job("--nproc-per-node", str(world_size), path, *arguments, TMPDIR=str(temporary))
    assert ended.code == 0, ended.err
    found = reports(ended)
    assert sorted(found) == list(range(world_size))
    for rank, report in found.items():
        assert report["LOCAL_RANK"] == str(rank)
        assert report["WORLD_SIZE"] == report["LOCAL_WORLD_SIZE"] == report["PHOTINUS_WORLD_SIZE"] == str(world_size)
        assert (report["GROUP_RANK"], report["TORCHELASTIC_RESTART_COUNT"]) == ("0", "0")
        assert report["MASTER_ADDR"] == "127.0.0.1"
        assert report["argv"] == [str(path), *arguments]
        assert report["name"] == "__main__"
        # One store, heard on the loopback only; the workers' own sockets are as private.
        assert (report["store_listens_on"], report["launcher_listens_on"]) == ([LOOPBACK], [])
        assert set(report.get("worker_listens_on", [LOOPBACK])) == {LOOPBACK}
        assert report.get("total", 3) == 3
    first, *others = sorted(ended.err.splitlines(), reverse=True)
    assert first == "a line on stderr"
    assert all(re.fullmatch(r"\[[\d,-]+\] a line on stderr", line) for line in others)  # equal lines are shown once
    assert bool(others) == (world_size > 1)
    assert list(temporary.iterdir()) == []


def test_a_module_runs_as_under_python_m_and_threads_share_the_cores(tmp_path):
    script(tmp_path, REPORT, "task.py")
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run(
        [sys.executable, "-m", "photinus", "run", "--nproc_per_node=2", "-m", "task", "--x"],
        capture_output=True, text=True, cwd=tmp_path, timeout=DEADLINE_S, env=environ,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = reports(Ended(0, ended.stdout, ended.stderr))
    assert found[1]["argv"] == [str(tmp_path / "task.py"), "--x"]
    assert found[0]["threads"] == str(max(1, usable_cores() // 2))


def test_auto_says_how_many_workers_it_takes_and_why(tmp_path):
    ended = run_job("--cpu", script(tmp_path, "import os; print(os.environ['WORLD_SIZE'])"))
    cores = usable_cores()
    assert ended.code == 0
    assert ended.out.splitlines()[0].split()[-1] == str(cores)
    assert ended.err == f"photinus: {cores} worker{'s' if cores > 1 else ''} (one per usable core)\n"


def test_gpus_asked_for_and_absent_are_refused_before_any_worker_starts(tmp_path):
    path = script(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    ended = run_job("--nproc-per-node", "gpu", path, CUDA_VISIBLE_DEVICES="")
    assert ended.code == 2
    assert ended.err.startswith("photinus: DeviceError: --nproc-per-node gpu asks for one worker per GPU")
    assert "torch sees 0 GPUs here" in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "ran").exists()


def test_where_the_loopback_interface_is_down_one_line_says_so_before_any_worker_starts(tmp_path):
    alone = ["unshare", "--net"]
    if os.geteuid() != 0 or subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("a network namespace needs root, and unshare")
    path = script(tmp_path, "import pathlib, sys; pathlib.Path(sys.argv[1], 'started').touch()")
    command = [*alone, sys.executable, "-m", "photinus", "run", "--cpu", "--nproc-per-node", "2", path, tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 1
    assert ended.stderr == (
        "photinus: LaunchError: the loopback interface is down (Network is unreachable), and the workers of this host "
        "need 127.0.0.1: `ip link set lo up`, or start the container with a network.\n"
    )
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_job_runs_where_proc_is_read_only(tmp_path, way):
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t proc -o ro proc /proc && exec "$@"', "sh"]
    if os.geteuid() != 0 or subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("a read-only /proc needs root, and unshare")
    path = script(tmp_path, "import torch.distributed as dist\ndist.init_process_group('gloo')\nprint('met')\n")
    words = ["--cpu", "--nproc-per-node", "1", "--start-method", way, path]
    command = [*alone, sys.executable, "-m", "photinus", "run", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "met\n", "")


def test_a_script_that_never_imports_photinus_or_torch_runs_in_silence(tmp_path):
    ended = run_job("--nproc-per-node", "2", script(tmp_path, "print('hello')"))
    assert (ended.code, sorted(ended.out.splitlines()), ended.err) == (0, ["[1] hello", "hello"], "")


def test_a_program_that_is_not_python_is_run_on_every_rank(tmp_path):
    ended = run_job(
        "--nproc-per-node", "2", "--no-python", "bash", "-c", 'echo "$RANK of $WORLD_SIZE" > rank.$RANK', cwd=tmp_path
    )
    assert ended.code == 0, ended.err
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(2)] == ["0 of 2\n", "1 of 2\n"]


def test_a_program_that_fails_is_named_with_its_exit_code(tmp_path):
    ended = run_job("--nproc-per-node", "2", "--max-restarts", "0", "--no-python", "bash", "-c", "exit $((RANK * 7))")
    assert ended.code == 7
    assert "rank 1" in ended.err
