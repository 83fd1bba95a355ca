"""The same mathematics at every world size: the loss of each step against plain torch in one process."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import photinus
from photinus.runlog.tables import read_rows
from photinus.trainer import CheckpointFolder
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
            batches = photinus.loader(data, batch_size=batch_size, drop_last=drop_last)
            loop = photinus.Loop(model, optimizer, batches, epochs=1, out=f"{out}/{name}", report=small_run.QUIET)
            for inputs, targets in loop:
                loop.backward(cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()


@pytest.fixture(scope="module")
def plain() -> dict[str, list[float]]:
    torch.set_num_threads(1)
    return {"even": _plain_losses(1437, BATCH_SIZE, True), "uneven": _plain_losses(119, 8, False)}


@pytest.mark.parametrize(("world_size", "backend"), [(1, "gloo"), (3, "photinus")])
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


def train_in_uneven_parts(rank: int, world_size: int, strategies: list[str], samples: int, out: str) -> dict[str, Any]:
    """Batches of 8, two to an optimizer's step, with BatchNorm, resumed inside an epoch: losses and weights."""
    torch.set_num_threads(1)
    found = {}
    for strategy in strategies:
        torch.manual_seed(0)
        model, data = small_run.Net(dropout=0.0), small_run.points(samples)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        folder = f"{out}/{strategy}"
        trainer = photinus.Trainer(
            model, optimizer, cross_entropy, epochs=2, accumulate=2, out=folder, strategy=strategy, clip_norm=1.0,
            metrics={"right": small_run.right}, report=small_run.QUIET,
        )  # fmt: skip
        with photinus.init(device="cpu", seed=0):
            batches = photinus.loader(data, batch_size=8, drop_last=False)
            result = trainer.fit(batches, small_run.points(31))
        losses = [row["loss"] for row in read_rows(Path(folder) / "losses.csv")] if rank == 0 else []
        weights = CheckpointFolder(Path(folder) / "checkpoints").newest().load(only=["model"])["model"]
        found[strategy] = (
            [*losses, *(row["valid_loss"] for row in result.history)],
            {name: value.tolist() for name, value in weights.items()},
        )
    return found


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


@pytest.mark.parametrize(
    ("samples", "strategies"), [(52, ["ddp", "zero1", "zero2", "zero3"]), (50, ["ddp", "zero2"])], ids=["4", "2"]
)
def test_batches_that_the_ranks_cannot_share_evenly_train_as_one_process_does(
    tmp_path: Path, samples: int, strategies: list[str]
) -> None:
    """8 samples on 3 ranks, 4 or 2 in the last batch: gradients, BatchNorm's statistics, norm and log are right."""
    where = "tests.parity.test_same_loss:train_in_uneven_parts"
    for_one: dict[str, Any] = {"strategies": ["ddp"], "samples": samples, "out": str(tmp_path / "one")}
    alone = run_ranks(where, world_size=1, backend="photinus", arguments=for_one)[0].value["ddp"]
    for_three: dict[str, Any] = {"strategies": strategies, "samples": samples, "out": str(tmp_path / "three")}
    together = run_ranks(where, world_size=3, backend="photinus", arguments=for_three)[0].value
    for strategy in strategies:
        for mine, theirs in zip(together[strategy], alone, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def train_with_a_loop_of_ones_own(rank: int, world_size: int, weighted: bool) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        model = photinus.wrap(nn.Linear(small_run.FEATURES, small_run.CLASSES))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in photinus.loader(small_run.points(32), batch_size=8, seed=0):
            loss = cross_entropy(model(inputs), targets)
            photinus.backward(loss) if weighted else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    warned = [str(each.message) for each in caught if "more samples" in str(each.message)]
    return [value.tolist() for value in photinus.unwrap(model).parameters()], warned


def test_a_loop_of_ones_own_is_weighted_by_photinus_backward_and_warned_without() -> None:
    where = "tests.parity.test_same_loss:train_with_a_loop_of_ones_own"

    def run(world_size: int, weighted: bool) -> list[Any]:
        given = {"weighted": weighted}
        return [each.value for each in run_ranks(where, world_size=world_size, backend="gloo", arguments=given)]

    alone = run(1, True)[0][0]
    for weighted in (True, False):
        three = run(3, weighted)
        close = all(torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(three[0][0], alone, strict=True))
        assert close == weighted
        assert [len(told) for _, told in three] == [0 if weighted else 1, 0, 0]
    assert "call photinus.backward(loss, weight=loader.weight)" in three[0][1][0]
