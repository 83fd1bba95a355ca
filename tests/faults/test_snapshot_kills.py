"""Workers are killed at random moments: snapshots lose at most one finished step, and not one bit of the result."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_run_end import descendants

TRAINING = """
import os, sys, time
folder, out, strategy, steps, every = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
writes = sys.argv[6] == "writes"
rank, attempt = os.environ["RANK"], os.environ["PHOTINUS_ATTEMPT"]

def note(*words):
    with open(f"{folder}/notes-{rank}", "a") as file:
        file.write(" ".join(map(str, words)) + "\\n")

note("process", attempt, os.getpid())
import torch, photinus
from torch import nn
from photinus.trainer.checkpoint import state_memory

if sys.argv[7] == "beside":  # another process writes the checkpoints, from snapshots
    state_memory.LEAST_BYTES = 0

def local(p):
    return p.to_local() if hasattr(p, "to_local") else p

class Keys(nn.Linear):  # is written in forward, as MoCo's key encoder is
    def forward(self, x):
        if writes and self.training:
            self.bias.data.mul_(0.9).add_(0.001)
            self.mean.data.mul_(0.9).add_(x.detach().mean())
        return super().forward(x)

with photinus.init("photinus", seed=1):
    x = torch.randn(640, 64)
    y = (x.sum(1) > 0).long()
    layers = nn.Linear(64, 515), nn.BatchNorm1d(515), nn.ReLU(), nn.Dropout(0.1), Keys(515, 515), nn.Linear(515, 2)
    layers[4].register_buffer("mean", torch.zeros(()))
    model = nn.Sequential(*layers)
    model, optimizer = photinus.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.003), strategy=strategy)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    save = photinus.Saving(every_steps=23, snapshot_every=every)
    loop = photinus.Loop(
        model, optimizer, torch.utils.data.TensorDataset(x, y), batch_size=24, steps=steps, out=out, save=save,
        state={"scheduler": scheduler}, report=photinus.Reporting(progress=False, curves=False),
    )
    note("began", attempt, loop.step, loop.resumed_from)
    for inputs, targets in loop:
        note("finished", loop.step - 1)
        weights = [*model.parameters()]
        if writes:  # in all the ways that no version counter and no hook of an optimizer shows
            for p in weights:
                p.data.mul_(0.9999)
            if strategy != "zero3":  # which refuses to
                weights[0].data = weights[0].data * 0.9999
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loop.backward(loss)
        if writes:
            part = local(weights[-2]).detach()
            part.numpy()[...] *= 0.9999
            if strategy != "zero3":
                torch.distributed.all_reduce(part, torch.distributed.ReduceOp.MAX)
                torch.distributed.broadcast(local(weights[0]).detach(), 0)
        optimizer.step()
        scheduler.step()
        time.sleep(0.01)
    note("ended", loop.step)
"""
DEADLINE_S = 240.0


class Run:
    """A job that trains, and what its ranks noted."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        strategy: str,
        steps: int,
        every: int = 1,
        *,
        writes: bool = False,
        beside: bool = False,
    ) -> None:
        self.folder, self.ranks, self.every = folder, ranks, every
        folder.mkdir()
        (folder / "train.py").write_text(TRAINING)
        self.words = [str(folder / "train.py"), str(folder), str(folder / "out"), strategy, str(steps), str(every)]
        self.words += ["writes" if writes else "-", "beside" if beside else "-"]
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "photinus", "run", "--cpu", "--max-restarts", "1000", "--nproc-per-node"]
        with open(self.folder / "printed", "a") as printed:
            self.job = subprocess.Popen(
                [*command, str(self.ranks), *self.words], stdout=printed, stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def notes(self) -> list[list[str]]:
        texts = [path.read_text() for path in sorted(self.folder.glob("notes-*"))]
        return [line.split() for text in texts for line in text.splitlines()]

    def finished(self) -> int:
        return max((int(words[1]) for words in self.notes() if words[0] == "finished"), default=0)

    def wait_for(self, kind: str, attempt: int) -> dict[int, int]:
        """The pids of the attempt's ranks, when all of them have come so far."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            notes = [[path.name, *line.split()] for path in self.folder.glob("notes-*") for line in path.open()]
            there = {words[0] for words in notes if words[1:3] == [kind, str(attempt)]}
            if len(there) == self.ranks:
                found = [words for words in notes if words[1:3] == ["process", str(attempt)]]
                return {int(words[0].partition("-")[2]): int(words[3]) for words in found}
            assert self.job.poll() is None, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.005)

    def wait_for_steps(self, more: int) -> None:
        """Wait until this number of steps more is finished."""
        wanted, deadline = self.finished() + more, time.monotonic() + DEADLINE_S
        while self.finished() < wanted:
            assert self.job.poll() is None, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.005)

    def printed(self) -> str:
        return (self.folder / "printed").read_text()

    def end(self) -> dict[str, Any]:
        """Waits for the end; returns the digests of what was trained."""
        try:
            assert self.job.wait(DEADLINE_S) == 0, self.printed()
        finally:
            self.close()
        newest = sorted((self.folder / "out" / "checkpoints").glob("step-*"))[-1]
        files = json.loads((newest / "manifest.json").read_text())["files"]
        return {name: files[name] for name in ("model", "optimizer", "scheduler")}

    def losses(self) -> list[tuple[str, str]]:
        rows = [line.split(",") for line in (self.folder / "out" / "losses.csv").read_text().splitlines()[1:]]
        return [(row[0], row[2]) for row in rows]

    def close(self) -> None:
        if self.job.poll() is None:
            self.job.send_signal(signal.SIGTERM)
            try:
                self.job.wait(20)
            except subprocess.TimeoutExpired:
                self.job.kill()
                self.job.wait()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("strategy", "ranks", "writes"),
    [
        ("ddp", 2, False),
        ("zero2", 2, False),
        ("ddp", 3, False),
        ("zero3", 3, False),
        ("ddp", 2, True),
        ("zero1", 2, True),
        ("zero3", 2, True),
    ],
)
def test_kills_at_random_moments_lose_one_finished_step_at_most_and_no_bit(tmp_path, strategy, ranks, writes):
    kill_at_random(tmp_path, strategy, ranks, writes, kills=13)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_kills_while_checkpoints_are_written_from_snapshots_lose_no_bit(tmp_path, strategy):
    kill_at_random(tmp_path, strategy, 2, writes=False, kills=4, beside=True)


def kill_at_random(
    tmp_path: Path, strategy: str, ranks: int, writes: bool, kills: int, *, beside: bool = False
) -> None:
    steps = 70 * kills
    quiet = Run(tmp_path / "quiet", ranks, strategy, steps, writes=writes, beside=beside)
    wanted = quiet.end()
    chance = random.Random(f"{strategy} {ranks}")
    run = Run(tmp_path / "killed", ranks, strategy, steps, writes=writes, beside=beside)
    try:
        for attempt in range(kills):
            is_early = attempt % 4 == 3  # while it starts, and goes on from memory
            pids = run.wait_for("process" if is_early else "began", attempt)
            if is_early:
                time.sleep(chance.uniform(0.0, 6.0))
            else:
                run.wait_for_steps(chance.randrange(40))
                time.sleep(chance.uniform(0.0, 0.1))
            assert run.job.poll() is None, f"it ended before kill {attempt}\n{run.printed()}"
            for rank in chance.sample(sorted(pids), 2 if attempt % 3 == 2 else 1):
                with suppress(ProcessLookupError):
                    os.kill(pids[rank], signal.SIGKILL)
        result = run.end()
    finally:
        run.close()
    began = {int(words[1]): int(words[2]) for words in run.notes() if words[0] == "began"}
    assert result == wanted
    assert run.losses() == quiet.losses()
    if beside:  # a kill in the middle of a copy goes back to the checkpoint that is being written
        return
    assert_few_steps_were_lost(run, began)


def assert_few_steps_were_lost(run: Run, began: dict[int, int]) -> None:
    finished = 0
    by_attempt: dict[int, int] = {}
    for path in run.folder.glob("notes-*"):
        attempt = 0
        for words in map(str.split, path.open()):
            if words[0] == "process":
                attempt = int(words[1])
            elif words[0] == "finished":
                by_attempt[attempt] = max(by_attempt.get(attempt, 0), int(words[1]))
    for attempt in sorted({*by_attempt, *began}):
        if attempt in began and attempt:
            assert finished - began[attempt] <= run.every, f"attempt {attempt} began at {began[attempt]} of {finished}"
        finished = max(finished, by_attempt.get(attempt, 0))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_killed_launcher_costs_the_steps_since_the_checkpoint_and_no_bit(tmp_path, strategy):
    wanted = Run(tmp_path / "quiet", 2, strategy, 200).end()
    run = Run(tmp_path / "killed", 2, strategy, 200)
    try:
        pids = run.wait_for("began", 0)
        run.wait_for_steps(60)
        deadline = time.monotonic() + DEADLINE_S
        run.job.kill()
        run.job.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        run.start()
        assert run.end() == wanted
    finally:
        run.close()
    assert "checkpoints/step-00000" in run.printed()
    assert "resumed from memory" not in run.printed()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_launcher_lets_the_ranks_train_and_restarts_them_when_it_goes_on(tmp_path):
    wanted = Run(tmp_path / "quiet", 2, "ddp", 120).end()
    run = Run(tmp_path / "stopped", 2, "ddp", 120)
    try:
        pids = run.wait_for("began", 0)
        run.job.send_signal(signal.SIGSTOP)
        run.wait_for_steps(30)  # with a copy in each, and a save
        os.kill(pids[1], signal.SIGKILL)
        time.sleep(1.0)
        run.job.send_signal(signal.SIGCONT)
        assert run.end() == wanted
    finally:
        run.job.send_signal(signal.SIGCONT)
        run.close()
    assert run.printed().count("photinus: restarting all 2 workers (restart 1 of ") == 1
    assert_few_steps_were_lost(run, {int(w[1]): int(w[2]) for w in run.notes() if w[0] == "began"})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_removed_folder_is_reported_once_and_training_goes_on_from_memory(tmp_path):
    wanted = Run(tmp_path / "quiet", 2, "ddp", 120).end()
    run = Run(tmp_path / "removed", 2, "ddp", 120)
    try:
        run.wait_for("began", 0)
        run.wait_for_steps(30)
        shutil.rmtree(run.folder / "out")
        assert run.end() == wanted
    finally:
        run.close()
    assert run.printed().count(" raised FileNotFoundError: ") == 1
    assert_few_steps_were_lost(run, {int(w[1]): int(w[2]) for w in run.notes() if w[0] == "began"})


@pytest.mark.timeout(300)
def test_a_killed_worker_comes_back_from_memory_with_the_same_bits_and_nothing_is_left(tmp_path):
    wanted = Run(tmp_path / "quiet", 2, "ddp", 70, writes=True).end()
    run = Run(tmp_path / "killed", 2, "ddp", 70, writes=True)
    try:
        pids = run.wait_for("began", 0)
        run.wait_for_steps(10)
        os.kill(pids[1], signal.SIGKILL)
        launcher = run.job.pid
        run.wait_for("began", 1)
        assert descendants(launcher)
        assert run.end() == wanted
    finally:
        run.close()
    resumed = re.search(r"resumed from memory: step (\d+) ", run.printed())
    assert resumed is not None, run.printed()
    assert "restarting all 2 workers (restart 1 of" in run.printed()
    assert_few_steps_were_lost(run, {int(w[1]): int(w[2]) for w in run.notes() if w[0] == "began"})
    assert not Path(f"/proc/{launcher}").exists()
