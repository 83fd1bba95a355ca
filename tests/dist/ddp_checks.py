"""What the tests of DistributedDataParallel share: models, comparisons, and the running of many checks at once.

Starting processes costs seconds, so one run per backend and world size does all checks, each over a group of its own
with a short deadline; every check is then a test with its own name.
"""

from __future__ import annotations

import copy
import datetime
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from photinus.parallel import DistributedDataParallel
from photinus.parallel.exchange.collectives import GroupAverage
from tests.dist.naive import broadcast_model
from tests.ranks import RanksFailedError, run_ranks, values

KIB_IN_MIB = 1 / 1024
"""A bucket cap, in MiB, so small that small test models have many buckets."""

_INSTALLED = pytest.mark.skipif(
    "photinus" not in dist.Backend.backend_list, reason="backend photinus is not installed here"
)
SETTINGS = [
    ("gloo", 2),
    pytest.param("photinus", 2, marks=_INSTALLED),
    pytest.param("photinus", 3, marks=_INSTALLED),
    pytest.param("gloo", 3, marks=pytest.mark.slow),
]
"""Backends and world sizes that every check runs under."""


# ---- running many checks in one set of processes

CHECKED_MODULES = (
    "tests.dist.test_ddp",
    "tests.dist.test_ddp_construction",
    "tests.dist.test_ddp_errors",
    "tests.dist.test_ddp_held_parameters",
    "tests.dist.test_ddp_hooks",
    "tests.dist.test_ddp_join",
    "tests.dist.test_ddp_options",
    "tests.dist.test_ddp_ranks_apart",
    "tests.dist.test_sync_batch_norm",
    "tests.parity.test_ddp",
)

Outcome = dict[str, str | None]
"""Traceback of each check that failed on a rank, None for one that passed."""


def run_checks(rank: int, world_size: int) -> Outcome:
    """Runs every check of the modules on this rank."""
    outcome: Outcome = {}
    for module in CHECKED_MODULES:
        for name, check in checks_of(vars(importlib.import_module(module))).items():
            torch.manual_seed(1234 + rank)
            group = dist.new_group(timeout=datetime.timedelta(seconds=25))
            try:
                check(group)
                outcome[f"{module}:{name}"] = None
            except Exception:  # noqa: BLE001 - reported as the check's outcome
                outcome[f"{module}:{name}"] = traceback.format_exc()
    return outcome


def checks_of(namespace: Mapping[str, Any]) -> dict[str, Callable[[dist.ProcessGroup], None]]:
    return {name: value for name, value in namespace.items() if name.startswith("check_")}


@cache
def outcomes(backend: str, world_size: int) -> list[Outcome] | RanksFailedError:
    """Every rank's outcomes, or why there are none; the processes run once per backend and world size."""
    try:
        return values(
            run_ranks("tests.dist.ddp_checks:run_checks", world_size=world_size, backend=backend, timeout_s=220)
        )
    except RanksFailedError as error:
        return error


def run_each_check(module: str) -> Callable[[str, str, int], None]:
    """A test for each check of a module, backend and world size; at its end: `test_this = run_each_check(__name__)`."""

    @pytest.mark.parametrize(("backend", "world_size"), SETTINGS)
    @pytest.mark.parametrize("check", checks_of(vars(sys.modules[module])))
    def test(check: str, backend: str, world_size: int) -> None:
        assert_check(module, check, backend, world_size)

    return test


def assert_check(module: str, name: str, backend: str, world_size: int) -> None:
    results = outcomes(backend, world_size)
    if isinstance(results, RanksFailedError):
        pytest.fail(str(results), pytrace=False)
    found = [outcome[f"{module}:{name}"] for outcome in results]
    failed = [f"----- rank {rank}\n{text}" for rank, text in enumerate(found) if text is not None]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)


def assert_close_in(dtype: torch.dtype, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal to 1e-6 of the largest element, or to two units in the last place of a half-precision dtype."""
    tolerance = max(1e-6, 2 * torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0)
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale, msg=what)


# ---- models


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3))


class TwoHeads(nn.Module):
    """Uses the head it is told to; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(6, 20)
        self.heads = nn.ModuleList([nn.Linear(20, 2) for _ in range(3)])

    def forward(self, x: torch.Tensor, head: int) -> dict[str, list[torch.Tensor]]:
        return {"out": [self.heads[head](torch.tanh(self.trunk(x)))]}


class SharedFrozenMixed(nn.Module):
    """Shared weights, a frozen layer, several dtypes, a channels_last weight, a gradient that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.wide = nn.Linear(6, 4, dtype=torch.float64)
        self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.factors = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.convolution = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(4, 5))
        self.strided = nn.Parameter(torch.randn(8, 3)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.second(torch.tanh(self.first(torch.tanh(self.first(x))))))
        y = self.narrow(self.wide(x.double()).to(torch.bfloat16)).float()
        y = (y * self.factors).abs() @ self.transposed.t().reshape(5, 4).t()
        image = y[None, :4, :4].expand(2, 4, 4)[None].contiguous(memory_format=torch.channels_last)
        return self.convolution(image).square().mean() + y.square().mean() + self.strided.square().sum()


def batch(group: dist.ProcessGroup, step: int = 0) -> torch.Tensor:
    """Another batch on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * group.rank() + step)
    return torch.randn(5, 6, generator=generator)


def naive_twin(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    twin = copy.deepcopy(model)
    broadcast_model(twin, group)
    return twin


def ddp_and_twin(
    model: nn.Module, group: dist.ProcessGroup, **options: Any
) -> tuple[DistributedDataParallel, nn.Module]:
    """The model wrapped, and a copy of it that starts from the same weights and knows no DDP."""
    twin = naive_twin(model, group)
    return DistributedDataParallel(model, process_group=group, **options), twin


def small_ddp(group: dist.ProcessGroup, **options: Any) -> DistributedDataParallel:
    """A small network in many buckets."""
    return DistributedDataParallel(small_net(), process_group=group, **{"bucket_cap_mb": KIB_IN_MIB, **options})


def assert_same_gradients(model: nn.Module, reference: nn.Module, group: dist.ProcessGroup) -> None:
    """Bit for bit, but for gloo with 3 ranks and more, whose order of addition depends on the position in a buffer."""
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is None:
            continue
        if group.size() == 2 or dist.get_backend(group) == "photinus":
            assert torch.equal(p.grad, q.grad), (name, (p.grad - q.grad).abs().max())
        else:
            assert_close_in(p.dtype, p.grad, q.grad, name)


def assert_equal_on_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    everyone = [torch.empty_like(tensor.contiguous()) for _ in range(group.size())]
    dist.all_gather(everyone, tensor.detach().contiguous(), group=group)
    assert all(torch.equal(everyone[0], other) for other in everyone)


@contextmanager
def expect(error: type[BaseException], *fragments: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    for fragment in fragments:
        assert fragment in str(caught.value), f"{fragment!r} is not in: {caught.value}"


@contextmanager
def launches() -> Iterator[list[int]]:
    """Collects the element count of every average that is started."""
    started: list[int] = []
    start = GroupAverage.start

    def recorded(self: GroupAverage, tensor: torch.Tensor, wire_dtype: torch.dtype | None = None) -> Any:
        started.append(tensor.numel())
        return start(self, tensor, wire_dtype)

    GroupAverage.start = recorded  # type: ignore[method-assign]
    try:
        yield started
    finally:
        GroupAverage.start = start  # type: ignore[method-assign]
