from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import photinus
from tests.ranks import run_ranks, values
from tests.small_run import Net, points, right

SAMPLES = 101  # a prime: no world size splits it


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def counted(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.ones(len(targets))


class Order:
    """A metric that depends on the order of the samples, as sums of floats do, and tells how many it saw."""

    def __init__(self) -> None:
        self.seen: list[float] = [-1.0]  # to be forgotten

    def reset(self) -> None:
        self.seen = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.seen += losses(outputs, targets).tolist()

    def compute(self) -> dict[str, Any]:
        return {"seen": len(self.seen), "values": self.seen}


class Mean(Order):
    """The same as a tensor."""

    def compute(self) -> Any:
        return torch.tensor(self.seen).mean()


def measure() -> dict[str, Any]:
    """What must be the same, bit by bit, at every world size."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = photinus.wrap(Net())
    named = [("loss", losses), ("right", right), ("counted", counted)]
    metrics = dict(named[dist.get_rank() :] + named[: dist.get_rank()])  # in another order on each rank, as of a set
    found: dict[str, Any] = {
        f"blocks of {block}": photinus.evaluate(model, points(SAMPLES), metrics, batch_size=block)
        for block in (4, 16, 64)
    }
    found["object"] = photinus.evaluate(model, points(SAMPLES), {"order": Order(), "loss": losses}, batch_size=8)
    found["tensor"] = photinus.evaluate(model, points(SAMPLES), Mean(), batch_size=8)
    found["few"] = photinus.evaluate(model, points(2), right)  # fewer samples than ranks
    return found


def on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    with photinus.init("auto", "cpu"):
        statistics, own = _local_statistics(rank), _ignored(rank)
        failed = {strategy: _fail(rank, strategy) for strategy in ("ddp", "zero3")}
        return {"measured": measure(), "failed": failed, "statistics": statistics, "own": own}


def _fail(rank: int, strategy: str) -> dict[str, str]:
    """Errors on rank 1 alone; afterwards the world still works."""
    model = photinus.wrap(Net(), strategy=strategy)
    found = {}

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        if rank == 1:
            raise ZeroDivisionError("in the metric")
        return right(outputs, targets)

    class Broken(Order):
        def update(self, outputs: Tensor, targets: Tensor) -> None:
            raise ZeroDivisionError("in update")

    class Local(Order):
        def compute(self) -> Any:
            return lambda: 0  # rank 0 alone computes it, and no other process can look it up

    cases: tuple[tuple[str, Any, Any, int], ...] = (
        ("pickle", points(40), Local(), 8),
        ("metric", points(40), metric, 8),
        ("data", [points(40)[n] if n != 8 else None for n in range(40)], right, 8),  # in rank 1's first block
        ("update", points(40), Broken(), 8),
        ("length", points(40 + rank), right, 8),
        ("block", points(40), right, 8 + rank),
        ("names", points(40), {"right": right, f"by rank {rank}": right}, 8),
        ("kind", points(40) if rank != 1 else None, right, 8),
    )
    for name, dataset, function, block in cases:
        try:
            photinus.evaluate(model, dataset, function, batch_size=block)
            found[name] = "no error"
        except Exception as error:  # noqa: BLE001 - the test reads it
            found[name] = f"{type(error).__name__}: {error}"
    found["after"] = str(photinus.evaluate(model, points(40), right))
    return found


def _local_statistics(rank: int) -> list[float]:
    """Batch norms that are not synchronised: each rank's running statistics are its own until it evaluates."""
    torch.manual_seed(3)
    model = photinus.wrap(torch.nn.Sequential(torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)), sync_batch_norm=False)
    model(torch.full((8, 1), 3.0 * rank) + torch.randn(8, 1))
    own = model.module[0].running_mean.item()
    data = TensorDataset(torch.arange(8.0)[:, None], torch.zeros(8))
    of_all = photinus.evaluate(model, data, lambda outputs, _: outputs[:, 0], batch_size=1)
    model.eval()
    with torch.no_grad():
        return [own, of_all, model.module(data.tensors[0]).double().mean().item()]


def _ignored(rank: int) -> list[float]:
    """A buffer that the wrapper was told to leave alone, of another size on each rank."""
    model = torch.nn.Linear(1, 1)
    model.register_buffer("own", torch.full((rank + 1,), float(rank)))
    model._ddp_params_and_buffers_to_ignore = ["own"]  # type: ignore[assignment]
    wrapped = photinus.wrap(model)
    photinus.evaluate(wrapped, TensorDataset(torch.ones(5, 1), torch.zeros(5)), lambda outputs, _: outputs[:, 0])
    own: list[float] = model.get_buffer("own").tolist()
    return own


def test_three_ranks_measure_as_one_and_share_their_errors() -> None:
    with photinus.init("gloo", "cpu"):
        alone = measure()
    assert alone["blocks of 4"]["counted"] == 1.0
    assert alone["object"]["order"]["seen"] == SAMPLES
    assert isinstance(alone["tensor"], float)
    results = values(run_ranks("tests.dist.test_evaluate:on_ranks", world_size=3, backend="photinus"))
    for rank, found in enumerate(results):
        assert found["measured"] == alone
        assert found["own"] == [float(rank)] * (rank + 1)
        for strategy, errors in found["failed"].items():
            who = "" if rank == 1 else "PhotinusError: evaluate failed on rank 1 "
            assert re.match(f"{who}.*ZeroDivisionError: in the metric", errors["metric"])
            assert re.match(f"{'' if rank == 1 else 'TypeError: evaluate failed on rank 1 '}.*NoneType", errors["data"])
            assert ("ZeroDivisionError: in update" if rank == 0 else "evaluate failed on rank 0") in errors["update"]
            different = "ValueError: the ranks were given different things to evaluate: "
            assert errors["length"].startswith(f"{different}samples=40 on rank 0, 41 on rank 1")
            assert errors["block"].startswith(f"{different}batch_size=8 on rank 0, 9 on rank 1")
            assert errors["names"].startswith(f"{different}metrics=['by rank 0', 'right'] on rank 0, ['by rank 1', ")
            assert "a dataset needs __len__ and __getitem__; NoneType has no" in errors["kind"]
            assert ("Local" if rank == 0 else "evaluate failed on rank 0") in errors["pickle"]
            assert errors["after"] == results[0]["failed"][strategy]["after"]
    # All evaluate the model that rank 0 would save.
    own, of_all, by_rank = zip(*(found["statistics"] for found in results), strict=True)
    assert len(set(own)) == 3
    assert len(set(of_all)) == 1
    assert all(abs(value - of_all[0]) < 1e-6 for value in by_rank)
