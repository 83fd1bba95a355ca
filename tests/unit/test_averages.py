"""`photinus.Average` in one process: when it is updated, what a Trainer validates, names, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import photinus
from tests.small_run import QUIET, Net, points, right


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with photinus.init("gloo", "cpu", seed=3):
        yield


def equal(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class Lookahead:
    """An optimizer around another one, of no class of torch's: after its step it moves the weights."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self) -> None:
        self.inner.step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def zero_grad(self) -> None:
        self.inner.zero_grad()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_it_follows_the_optimizers_step_whatever_is_around_the_optimizer(is_wrapped: bool) -> None:
    net = Net(0.0)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = Lookahead(optimizer) if is_wrapped else optimizer
    average = photinus.Average(net, get_ema_multi_avg_fn(0.0))  # the model itself
    loop = photinus.Loop(net, optimizer, points(), batch_size=16, epochs=1, state={"ema": average}, report=QUIET)
    for inputs, targets in loop:
        loop.backward(cross_entropy(net(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        assert is_wrapped or equal(average.module, net)  # in the body already, as an evaluation wants it
    assert equal(average.module, net)
    assert int(average.n_averaged) == 3


@pytest.mark.parametrize("every", [1, 2])  # the second optimizer steps in each body, or in every second one
@pytest.mark.parametrize("order", [1, -1])
def test_of_two_optimizers_it_follows_the_last_that_steps(every: int, order: int) -> None:
    net = Net(0.0)
    parameters = [*net.parameters()]
    optimizers = [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.AdamW(parameters[2:], lr=0.1)]
    average = photinus.Average(net, get_ema_multi_avg_fn(0.0))  # the model itself
    state = {"ema": average, "second": optimizers[1]}
    loop = photinus.Loop(net, optimizers[0], points(), batch_size=8, epochs=1, state=state, report=QUIET)
    for inputs, targets in loop:
        loop.backward(cross_entropy(net(inputs), targets))
        for optimizer in optimizers[::order]:
            if optimizer is optimizers[0] or loop.step % every == 0:
                optimizer.step()
            optimizer.zero_grad()
        measured = photinus.evaluate(average, points(31), lambda outputs, _: outputs.sum(1))
        assert measured == photinus.evaluate(net, points(31), lambda outputs, _: outputs.sum(1))
        assert equal(average.module, net)
    assert equal(average.module, net)
    assert int(average.n_averaged) == 6  # once in each step, the last one too


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_no_update(fused: bool) -> None:
    net = Net(0.0)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused), torch.amp.GradScaler("cpu")
    average = photinus.Average(net)
    state = {"ema": average, "scaler": scaler}
    loop = photinus.Loop(net, optimizer, points(), batch_size=16, epochs=1, state=state, report=QUIET)
    for inputs, targets in loop:
        loss = cross_entropy(net(inputs), targets)
        loop.backward(loss * 1e30 * 1e30 if loop.step == 2 else loss, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert int(average.n_averaged) == 2


def test_it_averages_the_model_that_it_was_made_from() -> None:
    first, second = nn.Linear(6, 1), nn.Linear(6, 1)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second))
    average = photinus.Average(second, get_ema_multi_avg_fn(0.0))
    state = {"second": second, "other": other, "ema": average}
    loop = photinus.Loop(first, optimizer, points(), batch_size=16, epochs=1, state=state, report=QUIET)
    for inputs, _ in loop:
        second.zero_grad()
        loop.backward(first(inputs).mean() + second(inputs).mean())
        optimizer.step()
        if loop.step == 2:
            other.step()
    assert int(average.n_averaged) == 1
    assert equal(average.module, second)
    with pytest.raises(ValueError, match=r"state\['ema'\] averages a Linear that no optimizer of the loop steps"):
        photinus.Loop(first, optimizer, points(), batch_size=16, epochs=1, state={"ema": average}, report=QUIET)


def fit(tmp_path: Path | None = None, **options: Any) -> tuple[Any, photinus.Average, nn.Module]:
    torch.manual_seed(0)
    net = Net(0.0)
    average = photinus.Average(net, get_ema_multi_avg_fn(0.9), **options)
    trainer = photinus.Trainer(
        net, torch.optim.SGD(net.parameters(), lr=0.1), cross_entropy, epochs=3, batch_size=16,
        metrics={"right": right}, callbacks=[average], report=QUIET, out=tmp_path,
    )  # fmt: skip
    return trainer.fit(points(), points(40)), average, net


def test_the_trainer_validates_with_the_average_or_with_the_model(tmp_path: Path) -> None:
    result, average, net = fit(tmp_path)
    losses = {name: photinus.evaluate(each, points(40), losses_of) for name, each in (("a", average), ("m", net))}
    assert result.metrics["valid_loss"] == pytest.approx(losses["a"])
    assert losses["a"] != pytest.approx(losses["m"])
    assert fit(validate=False)[0].metrics["valid_loss"] == pytest.approx(losses["m"])
    assert fit(first_step=100)[0].metrics["valid_loss"] == pytest.approx(losses["m"])  # not updated so far
    again = fit(tmp_path)[1]  # a finished run: all is from the checkpoint
    assert equal(again, average)
    plain = Net()
    photinus.load(tmp_path, average=plain)
    assert equal(plain, average.module)


def losses_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def test_torchs_average_over_a_wrapped_model_is_saved_with_plain_names(tmp_path: Path) -> None:
    net = Net(0.0)
    wrapped, _ = photinus.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
    average, path = AveragedModel(wrapped), tmp_path / "file.pt"
    assert "module.module.0.weight" in average.state_dict()
    photinus.save(path, average=average, model=net)
    assert set(torch.load(path)["average"]) == {"n_averaged", *(f"module.{name}" for name in net.state_dict())}
    for target in (Net(), AveragedModel(Net()), AveragedModel(photinus.wrap(Net()))):
        photinus.load(path, average=target)
        found = target.module if isinstance(target, AveragedModel) else target
        assert equal(found, net)  # type: ignore[arg-type]
    counting = nn.Linear(1, 1)
    counting.register_buffer("n_averaged", torch.tensor(3))
    photinus.save(path, model=counting)
    photinus.load(path, model=copy.deepcopy(counting))


def test_what_cannot_be_averaged_is_refused() -> None:
    net = Net()
    for arguments, error in (
        ((AveragedModel(net),), r"an average of a AveragedModel: needs a model"),
        ((net, 0.999), r"multi_avg_fn=0\.999: needs a function, such as get_ema_multi_avg_fn"),
    ):
        with pytest.raises(TypeError, match=error):
            photinus.Average(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every=0 is too small"):
        photinus.Average(net, every=0)
    with pytest.raises(TypeError, match=r"callbacks\[0\] is torch's AveragedModel, which nothing updates: use photin"):
        photinus.Trainer(
            net, torch.optim.SGD(net.parameters()), cross_entropy, epochs=1, callbacks=[AveragedModel(net)]
        )
