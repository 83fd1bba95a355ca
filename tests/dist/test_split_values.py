"""Writes into slices of split parameters and gradients, and reads from them, give what one process gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import photinus
from tests.ranks import run_ranks, values

ROWS, COLUMNS = 7, 4
pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="before torch 2.13 a slice is a copy, and one warning says so"
)


def _index(tensor: Any, where: Any, value: Any) -> None:
    tensor[where] = value


WRITES: dict[str, Callable[[Any], Any]] = {
    "w[0].zero_()": lambda w: w[0].zero_(),
    "w[0] = 0": lambda w: _index(w, 0, 0.0),
    "w[-1].mul_(2)": lambda w: w[-1].mul_(2),
    "w[2:4].mul_(0)": lambda w: w[2:4].mul_(0),
    "w[1:6:2].add_(1)": lambda w: w[1:6:2].add_(1),
    "w[2:5] = a plain tensor": lambda w: _index(w, slice(2, 5), torch.arange(3.0 * COLUMNS).view(3, COLUMNS)),
    "w.data[2].zero_()": lambda w: w.data[2].zero_(),
    "w.detach()[2, 1] = 5": lambda w: _index(w.detach(), (2, 1), 5.0),
    "w[:, 1] = 0": lambda w: _index(w, (slice(None), 1), 0.0),
    "w[:, 1:3].mul_(2)": lambda w: w[:, 1:3].mul_(2),
    "w[3:, 1] = 4": lambda w: _index(w, (slice(3, None), 1), 4.0),
    "w.select(0, 3).fill_(2)": lambda w: w.select(0, 3).fill_(2),
    "w.narrow(0, 1, 3).zero_()": lambda w: w.narrow(0, 1, 3).zero_(),
    "both of w.chunk(2)": lambda w: [part.mul_(number + 2) for number, part in enumerate(w.chunk(2))],
    "w.split(3)[1].zero_()": lambda w: w.split(3)[1].zero_(),
    "each row of w": lambda w: [row.div_(row.norm()) for row in w],
    "w.t()[:, 2].zero_()": lambda w: w.t()[:, 2].zero_(),
    "w.diagonal().zero_()": lambda w: w.diagonal().zero_(),
    "a slice of a slice": lambda w: w[2:6][1:3][0].zero_(),
    "w[[0, 5]] = 0": lambda w: _index(w, [0, 5], 0.0),
    "w[mask] = 1": lambda w: _index(w, torch.arange(ROWS) % 2 == 0, 1.0),
    "w.index_fill_": lambda w: w.index_fill_(0, torch.tensor([1, 2]), 3.0),
    "out=w[1]": lambda w: torch.mul(w[2], 2, out=w[1]),
    "foreach": lambda w: torch._foreach_mul_(w.chunk(2), 3.0),
    "w.copy_(a plain tensor)": lambda w: w.copy_(torch.arange(1.0 * ROWS * COLUMNS).view(ROWS, COLUMNS)),
    "w[:, 1] = a plain tensor": lambda w: _index(w, (slice(None), 1), torch.arange(1.0 * ROWS)),
    "w.data.copy_(a row)": lambda w: w.data.copy_(torch.arange(1.0 * COLUMNS)),
    "w.t().mul_(2)": lambda w: w.t().mul_(2),
    "w[:].mul_(2)": lambda w: w[:].mul_(2),
    "init of a row": lambda w: nn.init.constant_(w[4], 0.5),
    "a row and a whole": lambda w: w.mul_(w[0].abs().sum() + 1),
}
READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda w: w.norm().item(),
    "float(sum)": lambda w: float(w.sum()),
    "int(count)": lambda w: int((w > 0).sum()),
    "max": lambda w: w.max().item(),
    "mean": lambda w: w.mean().item(),
    "infinity norm": lambda w: w.norm(math.inf).item(),
    "a ratio of norms": lambda w: w.norm(1).item() / w.norm().item(),
    "sum of squares": lambda w: w.norm().item() ** 2,
    "math.sqrt": lambda w: math.sqrt(w.square().sum()),
    "any": lambda w: bool((w > 1).any()),
    "if": lambda w: 1 if (w > 99).sum() else 2,
    "one element": lambda w: w[5, 1].item(),
    "norm of a row": lambda w: w[-1].norm().item(),
    "norms of rows": lambda w: w.norm(dim=1)[6].item(),
    "compared": lambda w: bool(w.norm() > 3.0),
    "a power of a sum": lambda w: w.sum().square().item(),
}

DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda w: w.normal_(),
    "normal_ with a generator": lambda w: w.normal_(generator=torch.Generator().manual_seed(3)),
    "uniform_": lambda w: w.uniform_(-1, 1),
    "bernoulli_": lambda w: w.bernoulli_(0.5),
    "random_": lambda w: w.random_(10),
    "exponential_": lambda w: w.exponential_(),
    "log_normal_": lambda w: w.log_normal_(),
    "geometric_": lambda w: w.geometric_(0.5),
    "cauchy_": lambda w: w.cauchy_(),
    "rand_like": lambda w: w.copy_(torch.rand_like(w)),
    "randn_like": lambda w: w.add_(torch.randn_like(w)),
    "randint_like": lambda w: w.copy_(torch.randint_like(w, 9)),
    "bernoulli": lambda w: w.copy_(torch.bernoulli(torch.sigmoid(w))),
    "eye_": lambda w: nn.init.eye_(w),
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w),
    "trunc_normal_": lambda w: nn.init.trunc_normal_(w),
}


def cases(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """Return how far each write and read is from the same in plain torch, for parameters and gradients."""
    found: dict[str, dict[str, float]] = {"write": {}, "read": {}, "draw": {}}
    torch.manual_seed(0)
    start = torch.randn(ROWS, COLUMNS)
    with photinus.init("gloo", "cpu"), torch.no_grad():
        model = photinus.wrap(nn.Linear(COLUMNS, ROWS), strategy="zero2")
        with torch.enable_grad():
            model(torch.ones(1, COLUMNS)).sum().backward()
        weight: Any = model.weight
        for of, split in (("parameter", weight), ("gradient", weight.grad)):
            first = list(start.chunk(world_size)) + [start[:0]] * world_size
            for name, write in WRITES.items():
                plain = start.clone()
                split.to_local().copy_(first[rank])
                write(plain)
                write(split)
                found["write"][f"{name}, {of}"] = float((split.full_tensor() - plain).abs().max())
            for name, draw in DRAWS.items():
                plain = start.clone()
                split.to_local().copy_(first[rank])
                for tensor in (plain, split):
                    torch.manual_seed(5)
                    draw(tensor)
                found["draw"][f"{name}, {of}"] = float((split.full_tensor() - plain).abs().max())
            split.to_local().copy_(first[rank])
            for name, read in READS.items():
                found["read"][f"{name}, {of}"] = abs(read(split) - read(start))
    return found


def stale(rank: int, world_size: int) -> list[str]:
    """Return the errors of slices that were taken before a change, and of a row that requires grad."""
    errors = []
    with photinus.init("gloo", "cpu"):
        weight: Any = photinus.wrap(nn.Linear(COLUMNS, ROWS), strategy="zero3").weight
        with torch.no_grad():
            row, rows = weight[0], weight[0:2]
            rows.mul_(2)
            for use in (lambda: row.zero_(), lambda: row.sum(), lambda: row[0], lambda: weight[0].zero_().sum()):
                try:
                    use()
                    errors.append("none")
                except Exception as error:  # noqa: BLE001 - the test reads it
                    errors.append(f"{type(error).__name__}: {error}")
    return errors


@cache
def said(world_size: int) -> list[dict[str, dict[str, float]]]:
    """Return what each rank found."""
    return values(run_ranks(f"{__name__}:cases", world_size=world_size, backend="gloo", timeout_s=120))


SIZES = [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world_size", SIZES)
def test_what_is_written_into_slices_of_split_tensors_is_kept(world_size: int) -> None:
    for rank in said(world_size):
        assert {name: worst for name, worst in rank["write"].items() if not worst < 1e-6} == {}


@pytest.mark.parametrize("world_size", SIZES)
def test_numbers_of_split_tensors_count_the_parts_of_all_ranks(world_size: int) -> None:
    for rank in said(world_size):
        assert {name: worst for name, worst in rank["read"].items() if not worst < 1e-5} == {}


@pytest.mark.parametrize("world_size", SIZES)
def test_values_that_are_made_for_split_tensors_are_those_of_one_process(world_size: int) -> None:
    for rank in said(world_size):
        assert {name: worst for name, worst in rank["draw"].items() if not worst < 1e-6} == {}


def test_a_slice_that_is_older_than_its_tensor_is_refused() -> None:
    for errors in values(run_ranks(f"{__name__}:stale", world_size=2, backend="gloo")):
        *old, new = errors
        assert all(error.startswith("PhotinusError: a slice of a split tensor was used after") for error in old)
        assert new == "none"
