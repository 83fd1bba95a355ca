"""Scripts whose gradients FSDP2 would lose: each trains as plain torch trains on the batches of all ranks together."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import photinus
from photinus.parallel import strategy_of
from tests.ranks import run_ranks, values
from tests.small_run import QUIET

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
_WIDTH = 8
_held: list[torch.Tensor] = []


class Block(nn.Module):
    """Keeps a loss of its own, as experts that are to be used evenly do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 4)

    def forward(self, inputs: Any) -> Any:
        hidden = getattr(inputs, "hidden", inputs)
        gates = self.gate(hidden)
        self.loss = gates.square().mean()
        outputs = torch.tanh(self.layer(hidden) + gates.mean(-1, keepdim=True))
        return outputs if hidden is inputs else types.SimpleNamespace(hidden=outputs)


class Net(nn.Module):
    """Gives what `show` makes of the scores and their loss."""

    def __init__(self, show: Callable[[nn.Module, torch.Tensor, torch.Tensor], Any], wraps: bool = False) -> None:
        super().__init__()
        self.show, self.wraps = show, wraps
        self.first, self.head = nn.Linear(4, _WIDTH), nn.Linear(_WIDTH, 3)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = self.first(inputs)
        hidden = types.SimpleNamespace(hidden=hidden) if self.wraps else hidden
        for block in self.blocks:
            hidden = block(hidden)
        scores = self.head(getattr(hidden, "hidden", hidden))
        return self.show(self, scores, scores.square().mean())


@dataclasses.dataclass
class Data:
    loss: Any


class Slotted:
    __slots__ = ("loss",)

    def __init__(self, loss: Any) -> None:
        self.loss = loss


def _keep(net: Any, scores: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    net.loss = loss
    return scores.detach()


def _from_scores(output: Any) -> torch.Tensor:
    return -output.log_prob(torch.zeros(5, dtype=torch.long)).mean()


# How a forward shows its loss, and how a script finds it, given the model and the output.
LOSSES: dict[str, tuple[Any, Any]] = {
    "a tensor": (lambda net, scores, loss: loss, lambda net, output: output),
    "a dataclass": (lambda net, scores, loss: Data(loss), lambda net, output: output.loss),
    "a UserDict": (lambda net, scores, loss: collections.UserDict(loss=loss), lambda net, output: output["loss"]),
    "an object": (lambda net, scores, loss: types.SimpleNamespace(loss=loss), lambda net, output: output.loss),
    "an object with slots": (lambda net, scores, loss: Slotted([{"loss": loss}]), lambda n, out: out.loss[0]["loss"]),
    "a distribution": (
        lambda net, scores, loss: torch.distributions.Categorical(logits=scores),
        lambda net, output: _from_scores(output),
    ),
    "an object among many": (
        lambda net, scores, loss: types.SimpleNamespace(
            words=dict.fromkeys(range(20_000)), inside=[Slotted({"loss": loss})]
        ),
        lambda net, output: output.inside[0].loss["loss"],
    ),
    "an attribute": (_keep, lambda net, output: net.loss),
    "attributes of blocks": (
        lambda net, scores, loss: loss,
        lambda net, output: output + sum(block.loss for block in net.blocks),
    ),
    "a list elsewhere": (lambda net, scores, loss: _held.append(loss), lambda net, output: _held.pop()),
    "a function": (lambda net, scores, loss: lambda: loss, lambda net, output: output()),
}


def _worst(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference to the reference, on rank 0, which alone has the whole state."""
    state = strategy_of(model).save(model)
    if torch.distributed.get_rank():
        return 0.0
    return max(float((state[name] - value).abs().max()) for name, value in reference.state_dict().items())


def _compare(
    strategy: str,
    reference: nn.Module,
    loss_of: Callable[[Any, Any, torch.Tensor], torch.Tensor],
    *,
    prepare: Callable[[Any], Any] = lambda net: None,
    late: bool = False,
    before: Callable[[Any, Any, Any], None] = lambda model, optimizer, inputs: None,
    between: Callable[[Any, Any], None] = lambda model, inputs: None,
) -> float:
    """Train a model under a strategy, and a copy in plain torch on what all ranks have; return their difference.

    Args:
        loss_of: (what to call, the plain model, inputs) -> the loss.
        prepare: called with both plain models; with `late`, after `wrap`. What it returns is called after a step.
        before: run before each forward under the strategy.
        between: run between forward and backward.
    """
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(size, 5, 4)
    plain = copy.deepcopy(reference)
    ends = [prepare(reference)]
    if not late:
        ends.append(prepare(plain))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, reference)]
    options: Any = {"shard": [Block]} if strategy == "zero3" else {}  # else one unit
    model, optimizer = photinus.wrap(plain, optimizers[0], strategy=strategy, **options)
    if late:
        ends.append(prepare(plain))
    for step in range(3):
        before(model, optimizer, inputs[rank])
        loss = loss_of(model, plain, inputs[rank])
        between(model, inputs[rank])
        photinus.backward(loss)
        torch.stack([loss_of(reference, reference, part) for part in inputs]).mean().backward()
        for each in (optimizer, optimizers[1]):
            each.step()
            each.zero_grad()
        for end in ends if step == 0 else []:
            if callable(end):
                end()
    return _worst(model, reference)


def _plain_net() -> Net:
    return Net(lambda net, scores, loss: loss)


def _evaluate(model: nn.Module, inputs: torch.Tensor) -> None:
    with torch.no_grad():
        model(inputs)
    del _held[1:]


def _mask_rows(net: Any) -> list[Any]:
    mask = (torch.arange(_WIDTH) % 2).float()[:, None]
    layers = (net.first, net.blocks[0].layer)
    return [layer.weight.register_hook(lambda gradient: gradient * mask) for layer in layers]


def _mask_rows_once(net: Any) -> Callable[[], None]:
    handles = _mask_rows(net)

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _halve(net: Any) -> None:
    def halve(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    for layer in (net.first, net.blocks[0].layer):
        layer.weight.register_post_accumulate_grad_hook(halve)


def _drop_by(drop: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], None]:
    def add_up_and_drop(model: Any, optimizer: Any, inputs: torch.Tensor) -> None:
        with strategy_of(model).no_sync(model):
            photinus.backward(10 * model(inputs))
        drop(model, optimizer)

    return add_up_and_drop


def _set_none(model: Any, _: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def cases(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """Run every case under every strategy; return the differences to plain torch."""
    with photinus.init("gloo", "cpu"):
        found = {strategy: _cases(strategy) for strategy in STRATEGIES}
        for way in (_by_trainer, _by_loop):
            sums = {strategy: way(strategy) for strategy in STRATEGIES}
            for strategy in STRATEGIES:
                found[strategy][f"a distribution, {way.__name__}"] = abs(sums[strategy] - sums["ddp"])
    return found


def _policy() -> tuple[Any, Any, Any]:
    """A model that returns a distribution, its optimizer, and data."""
    torch.manual_seed(0)
    net = Net(LOSSES["a distribution"][0])
    data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
    return net, torch.optim.SGD(net.parameters(), lr=0.1), data


def _sum(model: nn.Module) -> float:
    state = strategy_of(model).save(model)
    return 0.0 if torch.distributed.get_rank() else float(sum(value.double().sum() for value in state.values()))


def _by_trainer(strategy: str) -> float:
    net, optimizer, data = _policy()

    def step(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = -model(batch[0]).log_prob(batch[1]).mean()
        return loss

    options: Any = {"strategy": strategy, "epochs": 2, "batch_size": 12, "report": QUIET}
    photinus.Trainer(net, optimizer, step=step, **options).fit(data, data)
    return _sum(net)


def _by_loop(strategy: str) -> float:
    net, optimizer, data = _policy()
    model, optimizer = photinus.wrap(net, optimizer, strategy=strategy)
    loop = photinus.Loop(model, optimizer, data, batch_size=12, epochs=2, report=QUIET)
    for inputs, labels in loop:
        loop.backward(-model(inputs).log_prob(labels).mean())
        _evaluate(model, inputs)
        optimizer.step()
        optimizer.zero_grad()
    return _sum(model)


def _cases(strategy: str) -> dict[str, float]:
    found: dict[str, float] = {}

    def call(called: Any, net: Any, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = called(inputs)
        return loss

    for name, (show, find) in LOSSES.items():

        def loss_of(called: Any, net: Any, inputs: torch.Tensor, find: Any = find) -> torch.Tensor:
            loss: torch.Tensor = find(net, called(inputs))
            return loss

        found[name] = _compare(strategy, Net(show), loss_of)
        if name not in ("an attribute", "attributes of blocks"):  # which an evaluation replaces
            found[f"{name}, evaluated between"] = _compare(strategy, Net(show), loss_of, between=_evaluate)
    found["objects between blocks"] = _compare(strategy, Net(LOSSES["a tensor"][0], wraps=True), call)
    for late in (False, True):
        when = "after wrap" if late else "before wrap"
        found[f"hooks {when}"] = _compare(strategy, _plain_net(), call, prepare=_mask_rows, late=late)
        found[f"hooks {when}, removed"] = _compare(strategy, _plain_net(), call, prepare=_mask_rows_once, late=late)
        found[f"post-accumulate hooks {when}"] = _compare(strategy, _plain_net(), call, prepare=_halve, late=late)
    drops: dict[str, Callable[[Any, Any], Any]] = {
        "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
        "optimizer.zero_grad(set_to_none=False)": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
        "p.grad = None": _set_none,
    }
    for name, drop in drops.items():
        found[name] = _compare(strategy, _plain_net(), call, before=_drop_by(drop))
    for reentrant in (False, True):

        def again(called: Any, net: Any, inputs: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
            loss: torch.Tensor = checkpoint(called, inputs.requires_grad_(), use_reentrant=reentrant)
            return loss

        found[f"checkpoint, use_reentrant={reentrant}"] = _compare(strategy, _plain_net(), again)
    return found


@cache
def said(world_size: int) -> dict[str, dict[str, float]]:
    """Return the differences that rank 0 found."""
    found: dict[str, dict[str, float]] = values(
        run_ranks(f"{__name__}:cases", world_size=world_size, backend="gloo", timeout_s=240)
    )[0]
    return found


def _assert_equal(strategy: str, world_size: int, named: Callable[[str], bool]) -> None:
    found = said(world_size)[strategy]
    assert any(map(named, found))
    assert {name: worst for name, worst in found.items() if named(name) and not worst < 1e-6} == {}


SIZES = [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_trains_the_model_wherever_the_forward_leaves_it(strategy: str, world_size: int) -> None:
    _assert_equal(strategy, world_size, lambda name: name.startswith(("objects", *LOSSES)))


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_on_parameters_are_called_whenever_they_are_made(strategy: str, world_size: int) -> None:
    _assert_equal(strategy, world_size, lambda name: "hooks" in name)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_added_up_without_an_exchange_are_dropped_by_zero_grad(strategy: str, world_size: int) -> None:
    _assert_equal(strategy, world_size, lambda name: "grad" in name and "hooks" not in name)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_around_the_whole_model_trains_it(strategy: str, world_size: int) -> None:
    _assert_equal(strategy, world_size, lambda name: name.startswith("checkpoint"))
