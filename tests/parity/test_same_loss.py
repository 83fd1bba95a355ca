"""The same mathematics at every world size: the loss of each step against plain torch in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import photinus
from photinus.runlog.tables import read_rows
from photinus.trainer.data.sampler import GlobalBatches
from tests import small_run
from tests.ranks import run_ranks

DIGITS = Path(__file__).resolve().parent.parent.parent / "examples" / "digits"
STEPS, BATCH_SIZE = 20, 64


def _digits() -> tuple[nn.Module, TensorDataset]:
    if str(DIGITS) not in sys.path:
        sys.path.insert(0, str(DIGITS))
    from data import digits
    from model import DigitsNet

    torch.manual_seed(0)
    return DigitsNet(), digits()[0]


def _plain_losses(samples: int, batch_size: int, drop_last: bool) -> list[float]:
    """Plain torch in one process, over the same batches."""
    model, data = _digits()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    batches = GlobalBatches(samples, batch_size, seed=0, drop_last=drop_last)
    losses = []
    for index in range(min(STEPS, len(batches))):
        chosen = batches.batch(0, index).indices
        inputs, targets = (tensor[chosen] for tensor in data.tensors)
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(rank: int, world_size: int, out: str) -> None:
    """Two short runs: even batches, and a last batch that does not split evenly among the ranks."""
    torch.set_num_threads(1)
    with photinus.init("auto", "cpu"):
        for name, samples, batch_size, drop_last in (("even", 1437, BATCH_SIZE, True), ("uneven", 119, 8, False)):
            plain, data = _digits()
            data = TensorDataset(*(tensor[:samples] for tensor in data.tensors))
            model, optimizer = photinus.wrap(plain, torch.optim.AdamW(plain.parameters(), lr=0.002))
            loop = photinus.Loop(
                model, optimizer, data, batch_size=batch_size, epochs=1, out=f"{out}/{name}", drop_last=drop_last,
                seed=0, progress=False, curves=False,
            )  # fmt: skip
            for inputs, targets in loop:
                loop.backward(cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    torch.set_num_threads(1)
    return {"even": _plain_losses(1437, BATCH_SIZE, True), "uneven": _plain_losses(119, 8, False)}


@pytest.mark.parametrize(("world_size", "backend"), [(1, "gloo"), (2, "photinus")])
def test_the_loss_of_each_step_is_that_of_one_process(
    tmp_path: Path, plain: dict[str, list[float]], world_size: int, backend: str
) -> None:
    where: dict[str, Any] = {"out": str(tmp_path)}
    run_ranks(
        "tests.parity.test_same_loss:train", world_size=world_size, backend=backend, arguments=where, timeout_s=120
    )
    for name, expected in plain.items():
        found = [row["loss"] for row in read_rows(tmp_path / name / "losses.csv")][:STEPS]
        assert len(found) == len(expected)
        assert max(abs(a - b) / b for a, b in zip(found, expected, strict=True)) < 1e-4
    assert len(plain["uneven"]) == 15  # 14 times 8 samples, then 7


def train_without_and_with_dropout(rank: int, world_size: int) -> list[list[float]]:
    runs = (small_run.train(None, epochs=6, noisy=False, backend="photinus", dropout=dropout) for dropout in (0.0, 0.5))
    return [[row["loss"] for row in run["history"]] for run in runs]


def test_only_dropout_sets_the_losses_of_two_ranks_apart_from_those_of_one() -> None:
    """What the README says of layers that draw random numbers."""
    where = "tests.parity.test_same_loss:train_without_and_with_dropout"
    one, two = (run_ranks(where, world_size=size, backend="photinus")[0].value for size in (1, 2))
    equal, apart = (
        max(abs(a - b) / b for a, b in zip(mine, theirs, strict=True)) for mine, theirs in zip(two, one, strict=True)
    )
    assert equal < 1e-4
    assert 1e-2 < apart < 0.5
