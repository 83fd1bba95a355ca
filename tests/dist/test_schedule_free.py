"""Optimizers with train() and eval() are switched where the weights are used: validation, "best", checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import photinus
from tests.optimizers import ScheduleFree
from tests.ranks import run_ranks, values
from tests.small_run import QUIET, Net, points

STRATEGIES = ("ddp", "torch-ddp", "zero1", "zero2", "zero3")
BATCH, EPOCHS = 12, 2


def plain() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = Net(0.0)
    return net, ScheduleFree(net.parameters())


def valid_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def train(strategy: str, out: Path | None, *, cut_at: int = 0, epochs: int = EPOCHS, save: int = 2) -> dict[str, Any]:
    """A Loop that validates in each epoch and saves every `save` steps; returns what it ends with."""
    net, optimizer = plain()
    model, optimizer = photinus.wrap(net, optimizer, strategy=strategy)
    saving = photinus.Saving(every_steps=save, best="-valid")
    loop = photinus.Loop(
        model, optimizer, points(), batch_size=BATCH, epochs=epochs, out=out, save=saving, report=QUIET
    )
    for inputs, targets in loop:
        loop.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if loop.validation_due:
            loop.log(valid=photinus.evaluate(model, points(31), valid_loss, batch_size=8))
        if loop.step == cut_at:
            break
    outputs = photinus.predict(model, points(16), on_all_ranks=True).flatten().tolist()
    best = copy.deepcopy(Net(0.0))
    if out is not None and not cut_at:
        photinus.load(out, model=best, best=True)
    with torch.no_grad():
        of_best = valid_loss(best.eval()(points(31).tensors[0]), points(31).tensors[1]).mean().item()
    return {"outputs": outputs, "valid": [row["valid"] for row in loop.history], "best": of_best}


def on_ranks(rank: int, world_size: int, out: str, strategies: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in strategies:
        place = Path(out, strategy)
        with photinus.init("auto", "cpu", seed=1):
            found[strategy] = train(strategy, place / "straight")
        for name, options in {"never saved": {"save": 99}, "cut": {"cut_at": 7}}.items():
            with photinus.init("auto", "cpu", seed=1):
                found[f"{strategy}, {name}"] = train(strategy, place / name, **options)
        with photinus.init("auto", "cpu", seed=1):
            found[f"{strategy}, resumed"] = train(strategy, place / "cut")
        with photinus.init("auto", "cpu", seed=1):
            found[f"{strategy}, ended before"] = train(strategy, place / "cut")
    return found


def naive() -> tuple[list[float], list[float]]:
    """A plain loop of torch over the same batches."""
    net, optimizer = plain()
    with photinus.init("gloo", "cpu", seed=1):
        batches = photinus.loader(points(), batch_size=BATCH)
        valid = []
        for _ in range(EPOCHS):
            net.train()
            optimizer.train()
            for inputs, targets in batches:
                cross_entropy(net(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            net.eval()
            optimizer.eval()
            with torch.no_grad():
                valid.append(valid_loss(net(points(31).tensors[0]), points(31).tensors[1]).mean().item())
        with torch.no_grad():
            return net(points(16).tensors[0]).flatten().tolist(), valid


@pytest.mark.timeout(180)
def test_what_is_validated_and_saved_are_the_weights_to_use(tmp_path: Path) -> None:
    check(2, tmp_path, ["zero1", "zero3"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_under_each_strategy_what_is_saved_are_the_weights_to_use(world_size: int, tmp_path: Path) -> None:
    check(world_size, tmp_path, [*STRATEGIES])


def check(world_size: int, folder: Path, strategies: list[str]) -> None:
    function, arguments = "tests.dist.test_schedule_free:on_ranks", {"out": str(folder), "strategies": strategies}
    runs = run_ranks(
        function,
        world_size=world_size,
        backend="photinus",
        timeout_s=170.0 if len(strategies) == 2 else 590.0,
        arguments=arguments,
    )
    outputs, valid = naive()
    for rank in values(runs):
        for name, found in rank.items():
            if "cut" in name:
                continue
            assert found["outputs"] == pytest.approx(outputs, rel=1e-3, abs=1e-4), name
            assert found["valid"] == pytest.approx(valid, rel=1e-4), name
            assert found["best"] == pytest.approx(min(valid), rel=1e-4), name
            assert found == rank[name.split(",")[0]], name  # to the last bit, whatever was saved meanwhile


def test_a_trainer_switches_with_the_same_bits_as_a_plain_loop(tmp_path: Path) -> None:
    net, optimizer = plain()
    with photinus.init("gloo", "cpu", seed=1):
        save = photinus.Saving(every_steps=1, best="-valid_loss")
        trainer = photinus.Trainer(
            net, optimizer, cross_entropy, epochs=EPOCHS, batch_size=BATCH, out=tmp_path, save=save, report=QUIET
        )
        result = trainer.fit(points(), points(31))
        saved = Net(0.0)
        photinus.load(tmp_path, model=saved)
    outputs, valid = naive()
    for model in (result.model, saved):
        assert model.eval()(points(16).tensors[0]).flatten().tolist() == outputs
    assert [row["valid_loss"] for row in result.history] == pytest.approx(valid, rel=1e-6)
