"""Scripts that split models and optimizers would train wrongly without a word: right, or an error that says why."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import photinus
from photinus.parallel import strategy_of
from tests.ranks import run_ranks, values
from tests.small_run import QUIET, points

SPLIT = ["zero2", "zero3"]
_WIDTH = 260  # so that layers are units


class Experts(nn.Module):
    """One of two experts computes, after a layer that all ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, _WIDTH)
        self.experts = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH) for _ in range(2)])

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        hidden: torch.Tensor = self.experts[which](self.first(inputs))
        return hidden


class KeyEncoder(nn.Module):
    """Moves its second layer towards the first in forward, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.key.weight.mul_(0.9).add_(self.query.weight, alpha=0.1)
        difference: torch.Tensor = self.query(inputs) - self.key(inputs).detach()
        return difference


class Keeping(nn.Linear):
    """Computes with a list of its parameters."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.both = [self.weight, self.bias]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, *self.both)


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test reads it
        return f"{type(error).__name__}: {error}"
    return "no error"


def _worst(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference to the reference, on rank 0, which alone has the whole state."""
    state = strategy_of(model).save(model)
    if torch.distributed.get_rank():
        return 0.0
    return max(float((state[name] - value).abs().max()) for name, value in reference.state_dict().items())


def cases(rank: int, world_size: int, strategy: str) -> dict[str, Any]:
    """Run every case; return its result on this rank."""
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, 4)
    with photinus.init("gloo", "cpu"):
        # Ranks that use different experts.
        reference = Experts()
        plain = copy.deepcopy(reference)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, reference)]
        model, optimizer = photinus.wrap(plain, optimizers[0], strategy=strategy, find_unused_parameters=True)
        for _ in range(2):
            photinus.backward(model(inputs[rank], rank).square().mean())
            torch.stack([reference(inputs[i], i).square().mean() for i in range(2)]).mean().backward()
            for each in (optimizer, optimizers[1]):
                each.step()
                each.zero_grad()
        found["experts"] = _worst(model, reference)
        # The same in a loop without the option.
        plain = Experts()
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1), strategy=strategy)
        loop = photinus.Loop(
            model, optimizer, torch.utils.data.TensorDataset(inputs[0]), batch_size=2, epochs=1, report=QUIET
        )

        def run() -> None:
            for (batch,) in loop:
                loop.backward(model(batch, rank).square().mean())
                optimizer.step()
                optimizer.zero_grad()

        found["experts in a loop"] = _error(run)
        # A layer that is unfrozen later.
        reference_model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        plain_model = copy.deepcopy(reference_model)
        for each in (plain_model, reference_model):
            each[0].requires_grad_(False)
        sgd = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain_model, reference_model)]
        model, optimizer = photinus.wrap(plain_model, sgd[0], strategy=strategy, find_unused_parameters=True)
        for step in range(3):
            if step == 1:
                for parameter in [*model.parameters(), *reference_model.parameters()]:
                    parameter.requires_grad_(True)
            photinus.backward(model(inputs[rank]).square().mean())
            reference_model(inputs.flatten(0, 1)).square().mean().backward()
            for each_optimizer in (optimizer, sgd[1]):
                each_optimizer.step()
                each_optimizer.zero_grad()
        found["unfrozen"] = _worst(model, reference_model)

        def change_alone() -> None:
            for step in range(9):
                photinus.backward(model(inputs[rank]).square().mean())
                if (rank, step) == (1, 0):
                    model[0].weight.grad.mul_(3)
                optimizer.step()
                optimizer.zero_grad()

        found["unfrozen on one rank"] = _error(change_alone)
        # Values that would be lost.
        plain = KeyEncoder()
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1), strategy=strategy)
        parameter = next(model.parameters())
        found["data"] = _error(lambda: setattr(parameter, "data", parameter.detach().clone()))
        found["written in forward"] = _error(lambda: model(inputs[rank]))
        keeping = photinus.wrap(Keeping(), strategy=strategy)
        found["kept in a list"] = _error(lambda: keeping(inputs[rank]).sum().backward())
        layer = photinus.wrap(nn.Linear(4, 4), strategy=strategy)
        point = inputs[rank].requires_grad_()
        found["penalty"] = _error(lambda: torch.autograd.grad(layer(point).sum(), point, create_graph=True))
        embedding = nn.Embedding(4, 4, max_norm=1.0)
        of_embedding = torch.optim.SGD(embedding.parameters(), lr=0.1)
        found["max_norm"] = _error(lambda: photinus.wrap(embedding, of_embedding, strategy=strategy))
        # Writes by `.data`, and what a script has from before `wrap`.
        plain_layer = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(plain_layer.parameters(), lr=0.1)
        old, of_group = [*plain_layer.parameters()], optimizer.param_groups[0]["params"]
        model, optimizer = photinus.wrap(plain_layer, optimizer, strategy=strategy)
        photinus.backward(model(inputs[rank]).square().mean())
        weight = next(model.parameters())
        found["data of a gradient"] = _error(lambda: setattr(weight.grad, "data", weight.grad * 2))
        found["old parameters"] = _error(lambda: nn.utils.clip_grad_norm_(old, 1.0))
        found["old parameters cleared"] = _error(lambda: setattr(old[0], "grad", None))
        found["copy of an old parameter"] = _error(lambda: copy.deepcopy(old[0]).grad)
        found["norm"] = [float(nn.utils.clip_grad_norm_(each, 1e9)) for each in (of_group, model.parameters())]
        for tensor in (weight, weight.grad):
            tensor.data *= 0
        found["data in place"] = float(weight.abs().sum() + weight.grad.abs().sum())
        users_own = [DTensor.from_local(torch.ones(2), weight.device_mesh) for _ in range(2)]
        found["data of a user's own"] = _error(lambda: setattr(users_own[0], "data", users_own[1]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.save(model.state_dict(), io.BytesIO())
        found["saved by torch"] = " ".join(str(each.message) for each in caught)
        penalty = model.weight.square().sum()
        found["penalty of parts"] = _error(lambda: photinus.backward(model(inputs[rank]).sum() + penalty))
        found["to the same"] = _error(lambda: model.to("cpu").float())
        found["to another"] = _error(model.half)
        # A plain state into an optimizer.
        plain_layer = nn.Linear(4, 4)
        adam = torch.optim.Adam(plain_layer.parameters(), lr=0.1)
        plain_layer(inputs[0]).square().mean().backward()
        adam.step()
        adam.zero_grad()
        state = copy.deepcopy(adam.state_dict())
        model, optimizer = photinus.wrap(plain_layer, torch.optim.Adam(plain_layer.parameters()), strategy=strategy)
        optimizer.load_state_dict(state)
        photinus.backward(model(inputs[rank]).square().mean())
        found["plain state"] = _error(optimizer.step)
    return found


@cache
def said(strategy: str) -> list[dict[str, Any]]:
    """Return the results of both ranks."""
    function, arguments = f"{__name__}:cases", {"strategy": strategy}
    return values(run_ranks(function, world_size=2, backend="gloo", arguments=arguments))


@pytest.mark.parametrize("strategy", SPLIT)
@pytest.mark.parametrize("case", ["experts", "unfrozen"])
def test_parameters_that_only_some_ranks_or_steps_use_are_trained_as_by_one_process(strategy: str, case: str) -> None:
    assert max(rank[case] for rank in said(strategy)) < 1e-6


@pytest.mark.parametrize("strategy", SPLIT)
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("experts in a loop", "ValueError: .*the ranks used different blocks of a split model"),
        ("written in forward", "PhotinusError: this forward wrote into key.weight"),
        ("data", "TypeError: .*does not change a parameter"),
        ("data of a gradient", "TypeError: .*does not change a parameter or a gradient"),
        ("old parameters", "PhotinusError: weight of Linear was split by photinus.wrap, and this tensor from before"),
        ("kept in a list", "PhotinusError: (weight|bias) of Keeping was split by photinus.wrap, and this tensor from"),
        ("old parameters cleared", "PhotinusError: weight of Linear was split"),
        ("copy of an old parameter", "no error"),
        ("penalty of parts", "ValueError: the loss was computed from parts of split parameters .*model's forward"),
        ("saved by torch", "a tensor that is split over 2 ranks is pickled .* use photinus.save on all ranks"),
        ("to the same", "no error"),
        ("to another", "TypeError: a split model keeps dtype, device and layout"),
        ("unfrozen on one rank", "ModelMismatchError: .*gradient of 0.weight=as averaged on rank 0, changed 1 times"),
        ("penalty", "PhotinusError: this backward has create_graph=True .* take strategy="),
        ("max_norm", "ValueError: .*max_norm, by which forward writes into its weight"),
        ("plain state", "no error"),
    ],
)
def test_what_would_be_lost_is_an_error(strategy: str, case: str, text: str) -> None:
    for rank in said(strategy):
        assert re.match(text, rank[case]), rank[case]


@pytest.mark.parametrize("strategy", SPLIT)
def test_what_a_script_keeps_of_an_optimizer_and_writes_by_data_counts(strategy: str) -> None:
    for rank in said(strategy):
        assert rank["norm"][0] == rank["norm"][1] > 0
        assert rank["data in place"] == 0
        assert rank["data of a user's own"] == "no error"


class Scaling(torch.optim.SGD):
    """Steps with a factor that a script sets, and counts its steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.factor, self.steps = 1.0, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for parameter in (each for group in self.param_groups for each in group["params"]):
            parameter.add_(parameter.grad, alpha=-0.1 * self.factor)


class Swapping(torch.optim.SGD):
    """Has other weights to evaluate with, as schedule-free optimizers do."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in filter(self.state.get, group["params"]):
                parameter.fill_(7.0)


def zero1_cases(rank: int, world_size: int, out: str) -> dict[str, Any]:
    """The same for optimizers that are split, and for a state that one rank alone has."""
    found: dict[str, Any] = {}
    with photinus.init("gloo", "cpu"):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        adam: Any = torch.optim.Adam(plain.parameters(), lr=0.1)
        model, adam = photinus.wrap(plain, adam, strategy="zero1")
        photinus.backward(model(torch.ones(2, 4)).square().mean())
        adam.step()
        for parameter in model.parameters():
            assert adam.state[parameter] is not None  # a look, which makes an empty state
        photinus.save(Path(out) / "x.pt", optimizer=adam)
        saved = photinus.load(Path(out) / "x.pt")["optimizer"]["state"]
        found["states"] = [sorted(state) for state in saved.values()]
        lone = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(lone.parameters())
        if rank == 0:
            lone(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        swapping: Any = Swapping(plain.parameters(), lr=0.1, momentum=0.9)
        model, swapping = photinus.wrap(plain, swapping, strategy="zero1")
        photinus.backward(model(torch.ones(2, 4)).square().mean())
        swapping.step()
        swapping.eval()
        found["evaluated"] = [float(parameter.min()) for parameter in model.parameters()]
        scaling: Any = Scaling(plain.parameters())
        model, scaling = photinus.wrap(plain, scaling, strategy="zero1")
        photinus.backward(model(torch.ones(2, 4)).square().mean())
        scaling.factor = 0.0
        scaling.step()
        found["attributes"] = [float(parameter.min()) for parameter in model.parameters()], scaling.steps
        found["state of one rank"] = _error(lambda: photinus.wrap(lone, optimizer, strategy="zero1"))
    return found


def test_a_split_optimizer_saves_all_states_and_changes_all_parameters(tmp_path: Path) -> None:
    function = f"{__name__}:zero1_cases"
    for found in values(run_ranks(function, world_size=2, backend="gloo", arguments={"out": str(tmp_path)})):
        assert found["states"] == [["exp_avg", "exp_avg_sq", "step"]] * 4
        assert found["evaluated"] == [7.0] * 4
        assert found["attributes"] == [[7.0] * 4, 1]
        assert "state of optimizer 1 for parameter 0=digest" in found["state of one rank"]


def groups_added(rank: int, world_size: int, out: str) -> dict[str, bool]:
    def run(strategy: str, place: Path | None, cut_at: int = 0) -> Any:
        with photinus.init("auto", "cpu", seed=1):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
            optimizer: Any = torch.optim.SGD(net[2].parameters(), lr=0.1, momentum=0.9)
            model, optimizer = photinus.wrap(net, optimizer, strategy=strategy)
            save = photinus.Saving(every_steps=2)
            loop = photinus.Loop(
                model, optimizer, points(), batch_size=12, epochs=2, out=place, save=save, report=QUIET
            )
            for inputs, targets in loop:
                if loop.step == 2:
                    optimizer.add_param_group({"params": photinus.trainer.unwrap(model)[0].parameters(), "lr": 0.05})
                loop.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                if loop.step == cut_at:
                    break
            return photinus.predict(model, points(8), on_all_ranks=True).tolist()

    found = {}
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        run(strategy, Path(out, strategy), cut_at=5)
        found[strategy] = run(strategy, Path(out, strategy)) == run(strategy, None)
    return found


@pytest.mark.timeout(120)
def test_parameter_groups_that_a_run_added_come_back_under_each_strategy(tmp_path: Path) -> None:
    function, arguments = f"{__name__}:groups_added", {"out": str(tmp_path)}
    for found in values(run_ranks(function, world_size=2, backend="photinus", timeout_s=110, arguments=arguments)):
        assert found == dict.fromkeys(("ddp", "zero1", "zero2", "zero3"), True)
