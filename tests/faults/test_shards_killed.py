"""A run over logical shards is killed at random moments, and goes on each time with another number of ranks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from photinus.cli.main import main
from photinus.parallel.zero.split_states import map_state

TRAINING = """
import os, sys, time
import torch, photinus
from torch import nn

out, strategy, wait_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
with open(f"{out}.pids", "a") as file:
    print(os.getpid(), os.getppid(), file=file)
with photinus.init(seed=1, logical_shards=6):
    x = torch.randn(480, 32)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
    model, optimizer = photinus.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.003), strategy=strategy)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.9)
    loop = photinus.Loop(
        model, optimizer, torch.utils.data.TensorDataset(x, y), batch_size=24, epochs=16, out=out,
        state={"scheduler": scheduler}, save=photinus.Saving(every_steps=9, snapshot_every=1),
        report=photinus.Reporting(progress=False, curves=False),
    )
    for inputs, targets in loop:
        if loop.rank == 0 and loop.micro_batch == 1:
            open(f"{out}.began", "w").close()
        loop.backward(nn.functional.cross_entropy(model(inputs), targets))
        if loop.step_due:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            time.sleep(wait_s)
"""
DEADLINE_S = 300.0


class Run:
    """A run, started again and again."""

    def __init__(self, folder: Path, strategy: str) -> None:
        folder.mkdir()
        self.folder, self.strategy = folder, strategy
        (folder / "train.py").write_text(TRAINING)

    def start(self, ranks: int, wait_s: float = 0.0) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "photinus", "run", "--cpu", "--nproc-per-node", str(ranks)]
        words = [str(self.folder / "train.py"), str(self.folder / "out"), self.strategy, str(wait_s)]
        (self.folder / "out.pids").write_text("")
        (self.folder / "out.began").unlink(missing_ok=True)
        with open(self.folder / "printed", "a") as printed:
            return subprocess.Popen([*command, *words], stdout=printed, stderr=subprocess.STDOUT)

    def pids(self) -> list[int]:
        return [int(line.split()[0]) for line in (self.folder / "out.pids").read_text().splitlines()]

    def result(self) -> tuple[list[Any], list[list[str]]]:
        newest = sorted((self.folder / "out" / "checkpoints").glob("step-*"))[-1]
        # Not the files' bytes: a state that was loaded has other objects for the same text.
        states = [torch.load(newest / f"{name}.pt") for name in ("model", "optimizer", "scheduler")]
        rows = [line.split(",") for line in (self.folder / "out" / "losses.csv").read_text().splitlines()[1:]]
        return [map_state(state, lambda tensor: tensor.tolist()) for state in states], [
            [row[0], row[2]] for row in rows
        ]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_killed_run_goes_on_with_another_number_of_ranks_and_the_same_bits(tmp_path: Path, strategy: str) -> None:
    quiet = Run(tmp_path / "quiet", strategy)
    assert quiet.start(1).wait(DEADLINE_S) == 0
    run, chance, kills = Run(tmp_path / "killed", strategy), random.Random(strategy), 0
    while True:
        ranks = chance.randint(1, 5)
        is_last = kills >= 15
        job = run.start(ranks, 0.0 if is_last else 0.08)
        try:
            if is_last:
                assert job.wait(DEADLINE_S) == 0, (run.folder / "printed").read_text()
                break
            deadline = time.monotonic() + DEADLINE_S
            is_early = chance.random() < 0.25
            while len(run.pids()) < ranks or not (is_early or (run.folder / "out.began").exists()):
                assert time.monotonic() < deadline
                assert job.poll() is None, (run.folder / "printed").read_text()
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 2.0))
            if chance.random() < 0.5:  # its launcher goes on from memory
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(run.pids()), signal.SIGKILL)
                time.sleep(chance.uniform(0.0, 6.0))
                kills += 1
            job.kill()
            job.wait()
            kills += 1
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(30)
        while any(Path(f"/proc/{pid}").exists() for pid in run.pids()):  # they follow their launcher
            assert time.monotonic() < deadline + 60
            time.sleep(0.01)
    printed = (run.folder / "printed").read_text()
    assert printed.count("resumed from memory") >= 2, printed
    assert printed.count("resumed from") >= 8, printed
    assert run.result() == quiet.result()
    assert main(["verify", str(run.folder / "out"), str(quiet.folder / "out")]) == 0
