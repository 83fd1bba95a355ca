"""After kills of any process of a job at any moment, nothing of the job is left when it has ended.

KILLS=200 SEED=2 pytest ... kills more often, and others.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

KILLS, SEED = int(os.environ.get("KILLS", "40")), int(os.environ.get("SEED", "39"))
TRAINING = """
import os, sys
folder = sys.argv[1]
with open(f"{folder}/pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
import torch, photinus
from photinus.trainer.checkpoint import state_memory
state_memory.LEAST_BYTES = 0  # another process writes the checkpoints
with photinus.init("photinus", seed=1) as world:
    data = torch.utils.data.TensorDataset(torch.randn(64, 512))
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3)))
    model, optimizer = photinus.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    loop = photinus.Loop(
        model, optimizer, photinus.loader(data, batch_size=4, num_workers=1), steps=16, out=f"{folder}/out",
        save=photinus.Saving(every_steps=5, snapshot_every=1), report=photinus.Reporting(progress=False, curves=False),
    )
    for inputs, in loop:
        if world.rank == 0:
            open(f"{folder}/steps", "w").write(str(loop.step))
        loop.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
DEADLINE_S, GONE_WITHIN_S = 300.0, 20.0
TORCHS = {"torchinductor_root"}  # its cache
WHOM = ("a worker", "a worker", "both workers", "launcher", "fork server", "writer", "store", "guard")


class Job:
    """A job whose processes are known by the folder that is TMPDIR to them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temporary = folder, folder / "tmp"
        self.temporary.mkdir(parents=True)
        (folder / "train.py").write_text(TRAINING)
        command = [sys.executable, "-m", "photinus", "run", "--cpu", "--max-restarts", "50", "-n", "2"]
        with open(folder / "printed", "w") as printed:
            self.launcher = subprocess.Popen(
                [*command, folder / "train.py", str(folder)], stdout=printed, stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)},
            )  # fmt: skip

    def processes(self) -> dict[int, str]:
        """Its processes, with what `ps` would show."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                command = (process / "cmdline").read_bytes()
                if str(self.temporary).encode() in (process / "environ").read_bytes() + command:
                    name = (process / "comm").read_text().strip()
                    found[int(process.name)] = f"{name} {command.replace(bytes(1), b' ').decode(errors='replace')}"
        return found

    def steps(self) -> int:
        with suppress(OSError, ValueError):
            return int((self.folder / "steps").read_text())
        return 0

    def wait_for_steps(self, number: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.launcher.poll() is None and self.steps() < number:
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.005)

    def kill(self, whom: str, chance: random.Random) -> bool:
        """Kill a part of the job; return whether it was there."""
        workers = []
        with suppress(OSError):
            workers = [int(line) for line in (self.folder / "pids").read_text().split()[-2:]]
        marks = {"fork server": "photinus-fork", "writer": "writer_process", "store": "photinus-store"}
        if whom == "launcher":
            pids = [self.launcher.pid]
        elif whom == "guard":
            pids = [pid for pid, text in self.processes().items() if text.startswith("photinus-guard")]
        elif whom in marks:
            pids = [pid for pid, text in self.processes().items() if marks[whom] in text]
        else:
            pids = workers if whom == "both workers" else chance.sample(workers, min(1, len(workers)))
        if self.launcher.poll() is not None:
            return False
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(pids)

    def left(self) -> list[str]:
        """What there is of it. (At the end of all tests, conftest looks for shared memory.)"""
        found = [f"{pid}: {text}" for pid, text in self.processes().items()]
        found += [f"{path} in TMPDIR" for path in self.temporary.iterdir() if path.name not in TORCHS]
        found += [line for line in Path("/proc/net/unix").read_text().splitlines() if str(self.temporary) in line]
        return found

    def printed(self) -> str:
        return (self.folder / "printed").read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_job_whose_processes_are_killed_at_any_moment_leaves_nothing(tmp_path: Path) -> None:
    chance, kills, number = random.Random(SEED), Counter[str](), 0
    while kills.total() < KILLS:
        job, killed = Job(tmp_path / str(number)), set[str]()
        number += 1
        try:
            for _ in range(chance.randrange(1, 4)):
                moment, whom = chance.choice(["start", "step", "step", "end"]), chance.choice(WHOM)
                if moment == "start":  # of the job, or of the workers that come after the kill before
                    time.sleep(chance.uniform(0.0, 2.0))
                else:
                    job.wait_for_steps(chance.randrange(1, 15) if moment == "step" else 15)
                    time.sleep(chance.uniform(0.0, 0.3))
                if job.kill(whom, chance):
                    kills[whom] += 1
                    killed.add(whom)
            code = job.launcher.wait(DEADLINE_S)
        finally:
            job.launcher.kill()
            job.launcher.wait()
        deadline = time.monotonic() + GONE_WITHIN_S
        while (left := job.left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        if killed >= {"guard", "launcher"}:  # who would remove the workers' folder after both?
            left = [each for each in left if "/photinus-" not in each]
        assert not left, f"after job {number} ({code}) there is {left}\n{job.printed()}"
        if code == 0:
            unfinished = [*(job.folder / "out").rglob(".tmp-*"), *(job.folder / "out").rglob("*.new")]
            assert not unfinished, job.printed()
        else:
            assert code < 0 or "photinus: " in job.printed(), job.printed()
    print(f"{number} jobs, kills of: {dict(kills)}")
