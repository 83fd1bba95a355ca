"""Our DDP under scripts that hook, skip and branch as torch's allows: the gradients are those of torch's class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from photinus import DistributedDataParallel
from photinus.errors import UnsuitableModelError
from tests.ranks import run_ranks, values

TORCH = nn.parallel.DistributedDataParallel


class Branches(nn.Module):
    """One of two layers, by the sign of `way`; or its weight itself, in a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, inputs: Tensor, way: float = 1.0) -> Tensor:
        output: Tensor = (self.left if way > 0 else self.right)(self.shared(inputs))
        return output


class Wrapped:
    """An output in which no tensor is found."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


class Hidden(Branches):
    def forward(self, inputs: Tensor, way: float = 1.0) -> Any:
        return Wrapped(super().forward(inputs, way))


class ReturnsWeight(Branches):
    def forward(self, inputs: Tensor, way: float = 1.0) -> Any:
        return super().forward(inputs, way), self.shared.weight


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def weights(model: nn.Module) -> list[float]:
    return [float(parameter.detach().double().sum()) for parameter in model.parameters()]


def gradients(model: nn.Module) -> list[float | None]:
    return [None if p.grad is None else float(p.grad.double().sum()) for p in model.parameters()]


def hooks_after_wrapping(kind: Any, rank: int) -> Any:
    model = kind(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []

    def clip(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.05, 0.05)

    def replace(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad / (1 + parameter.grad.norm())

    handles = []
    for step in range(5):
        if step == 1:
            handles = [p.register_post_accumulate_grad_hook(clip) for p in model.parameters()]
        if step == 3:
            handles[0].remove()
            next(model.parameters()).register_post_accumulate_grad_hook(replace)
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()
        found.append(weights(model))
    return found


def forwards_in_no_sync(kind: Any, rank: int) -> Any:
    model, found = kind(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), []
    for both in (True, False):
        model.zero_grad()
        loss = model(batch(rank)).square().sum()
        with model.no_sync():
            teacher = model(batch(rank, 1)).square().sum()
        (loss + teacher if both else loss).backward()
        found.append(gradients(model))
        with model.no_sync():  # the round is over: this one stays local
            model.zero_grad()
            model(batch(rank, 2)).square().sum().backward()
        found.append(gradients(model))
    return found


def leaves_as_outputs(kind: Any, rank: int) -> Any:
    model = kind(ReturnsWeight(), find_unused_parameters=True)
    for step in range(20):
        output, weight = model(batch(rank, step), 1.0 - 2 * rank)
        (output.sum() + weight.sum()).backward()
    return len(model.module.shared.weight._backward_hooks or ()) < 3, gradients(model)


SAME_AS_TORCH = (hooks_after_wrapping, forwards_in_no_sync, leaves_as_outputs)


def optimizers_in_backward(rank: int) -> list[list[list[float]]]:
    """Ranks take different branches, which a static graph does not ask about; beside it, the same with a plain step."""
    found = []
    for inside in (True, False):
        plain = Branches()
        if inside:
            _apply_optimizer_in_backward(torch.optim.SGD, plain.parameters(), {"lr": 0.1})
        model = DistributedDataParallel(plain, static_graph=True)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        steps = []
        for step in range(4):
            model(batch(rank, step), 1.0 - 2 * rank).square().sum().backward()
            if not inside:
                optimizer.step()
                optimizer.zero_grad()
            steps.append(weights(plain))
        found.append(steps)
    return found


def errors(rank: int) -> dict[str, str]:
    found = {}
    hidden = DistributedDataParallel(Hidden(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    expanded = nn.Linear(4, 4)
    expanded.register_buffer("mask", torch.zeros(1).expand(2, 2))
    cases = {
        "skipped": lambda: hidden(batch(rank)).output.sum().backward(),
        "expanded": lambda: DistributedDataParallel(expanded),
    }
    for name, call in cases.items():
        try:
            call()
            found[name] = "nothing"
        except (RuntimeError, UnsuitableModelError) as error:
            found[name] = str(error)
    return found


def on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"optimizers": optimizers_in_backward(rank)}
    for case in SAME_AS_TORCH:
        torch.manual_seed(0)
        ours = case(DistributedDataParallel, rank)
        torch.manual_seed(0)
        found[case.__name__] = [ours, case(TORCH, rank)]
    found["errors"] = errors(rank)
    return found


@pytest.mark.timeout(120)
def test_scripts_that_hook_skip_and_branch_train_as_with_torchs_class() -> None:
    ranks = values(
        run_ranks("tests.dist.test_ddp_odd_scripts:on_ranks", world_size=2, backend="photinus", timeout_s=100)
    )
    for found in ranks:
        for case in SAME_AS_TORCH:
            ours, theirs = found[case.__name__]
            assert _flat(ours) == pytest.approx(_flat(theirs), rel=1e-5, abs=1e-6), case.__name__
        inside, plain = found["optimizers"]
        assert _flat(inside) == pytest.approx(_flat(plain), rel=1e-5)
        assert "got a gradient after its bucket" in found["errors"]["skipped"]
        assert "mask is expanded" in found["errors"]["expanded"]
    assert ranks[0]["hooks_after_wrapping"] == ranks[1]["hooks_after_wrapping"]


def _flat(value: Any) -> list[float]:
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in _flat(each)]
    return [-1.0 if value is None else float(value)]
