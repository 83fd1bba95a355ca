"""Tests of several ranks whose checkpoint another process writes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import photinus
from photinus.trainer.checkpoint import state_memory
from photinus.trainer.checkpoint.folder import CheckpointFolder
from photinus.trainer.checkpoint.writer import WRITER
from tests.ranks import run_ranks, values
from tests.small_run import train


def train_beside(rank: int, world_size: int, out: str, strategy: str, least_bytes: int) -> list[Any]:
    """The name of the last checkpoint of a run, and its files."""
    state_memory.LEAST_BYTES = least_bytes
    with photinus.init("gloo", "cpu", seed=3):
        plain = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
        model, optimizer = photinus.wrap(plain, optimizer, strategy=strategy)
        data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
        report = photinus.Reporting(progress=False, curves=False)
        loop = photinus.Loop(model, optimizer, data, batch_size=6, epochs=5, out=out, report=report)
        for inputs, targets in loop:
            loop.backward((model(inputs) - targets).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert loop.checkpoint is not None
        return [loop.checkpoint.name, sorted(os.listdir(loop.checkpoint))]


@pytest.mark.parametrize(
    "strategy", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero1")), "zero3"]
)
def test_every_strategys_states_are_written_as_if_at_once(tmp_path: Path, strategy: str) -> None:
    found = []
    for least_bytes in (0, 1 << 60):
        out = tmp_path / str(least_bytes)
        arguments = {"out": str(out), "strategy": strategy, "least_bytes": least_bytes}
        function = "tests.dist.test_saving_beside_training:train_beside"
        names = values(run_ranks(function, world_size=2, backend="gloo", arguments=arguments))
        assert names[0] == names[1]
        newest = CheckpointFolder(out / "checkpoints").newest()
        assert newest is not None
        found.append(str({name: newest.load()[name] for name in ("model", "optimizer", "rng")}))
    assert found[0] == found[1]


def lose_the_writer(rank: int, world_size: int, out: str) -> str:
    """The error of a rank, after the process that writes was killed."""
    state_memory.LEAST_BYTES = 0

    def kill(step: int) -> None:
        if WRITER._process is None or step not in (8, 9):
            return
        if step == 8:  # so that it has not yet written what is saved after this body
            while WRITER.is_busy and not WRITER.has_answered:
                time.sleep(0.01)
        WRITER._process.send_signal(signal.SIGSTOP if step == 8 else signal.SIGKILL)

    try:
        with photinus.init("gloo", "cpu"):
            train(out, epochs=5, samples=480, save_every=4, kill=kill)
    except photinus.errors.CheckpointError as error:
        return str(error)
    return "no error"


def save_sparse_momentum(rank: int, world_size: int, out: str) -> bool:
    """Return whether the momentum of sparse gradients comes back from a checkpoint that is written beside training."""
    state_memory.LEAST_BYTES = 0
    with photinus.init("gloo", "cpu", seed=3):
        plain = torch.nn.EmbeddingBag(10, 3, sparse=True)
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
        data = torch.utils.data.TensorDataset(torch.arange(24).reshape(12, 2) % 10)
        report = photinus.Reporting(progress=False, curves=False)
        loop = photinus.Loop(model, optimizer, data, batch_size=6, epochs=2, out=out, report=report)
        for (indices,) in loop:
            loop.backward(model(indices).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert loop.checkpoint is not None
        another = torch.optim.SGD([torch.nn.Parameter(torch.zeros(10, 3))], lr=0.1, momentum=0.9)
        photinus.load(loop.checkpoint, optimizer=another)
        found, wanted = (next(iter(each.state.values()))["momentum_buffer"] for each in (another, optimizer))
        return found.is_sparse and torch.equal(found.to_dense(), wanted.to_dense())


def test_momentum_of_sparse_gradients_is_saved(tmp_path: Path) -> None:
    function = "tests.dist.test_saving_beside_training:save_sparse_momentum"
    assert values(run_ranks(function, world_size=2, backend="gloo", arguments={"out": str(tmp_path)})) == [True, True]


def test_a_failed_write_is_raised_on_all_ranks(tmp_path: Path) -> None:
    function = "tests.dist.test_saving_beside_training:lose_the_writer"
    errors = values(run_ranks(function, world_size=2, backend="gloo", arguments={"out": str(tmp_path)}))
    assert "was killed by SIGKILL. What was written before is untouched" in errors[0]
    assert "failed on rank 0" in errors[1]
    assert CheckpointFolder(tmp_path / "checkpoints").newest() is not None
