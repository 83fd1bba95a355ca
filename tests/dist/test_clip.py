"""`loop.clip(value=...)` clips what torch's clip_grad_value_ would, under each strategy, with a GradScaler too."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import photinus
from tests.ranks import run_ranks, values
from tests.small_run import QUIET, Net, points

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
LIMIT = 0.02


def train(strategy: str, half: bool, *, by_torch: bool = False) -> list[float]:
    torch.manual_seed(0)
    net = Net(0.0)
    model, optimizer = photinus.wrap(net, torch.optim.SGD(net.parameters(), lr=0.3), strategy=strategy)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**8) if half else None
    state = {"scaler": scaler} if half else {}
    loop = photinus.Loop(model, optimizer, points(), batch_size=12, steps=6, state=state, report=QUIET)
    for inputs, targets in loop:
        with torch.autocast("cpu", torch.float16) if half else nullcontext():
            loss = cross_entropy(model(inputs), targets)
        loop.backward(loss, scaler=scaler)
        if half:
            scaler.unscale_(optimizer)
        if by_torch:
            torch.nn.utils.clip_grad_value_(net.parameters(), LIMIT)
        else:
            assert loop.clip(value=LIMIT) is None
        if half:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return photinus.predict(model, points(16), on_all_ranks=True).flatten().tolist()


def on_ranks(rank: int, world_size: int) -> dict[str, list[float]]:
    found = {}
    for strategy in STRATEGIES:
        for half in (False, True):
            with photinus.init("auto", "cpu", seed=1):
                found[f"{strategy}, {half}"] = train(strategy, half)
    return found


@pytest.mark.timeout(90)
def test_each_element_is_clipped_under_each_strategy() -> None:
    first, second = values(run_ranks("tests.dist.test_clip:on_ranks", world_size=2, backend="photinus", timeout_s=80))
    assert first == second
    for half in (False, True):
        with photinus.init("gloo", "cpu", seed=1):
            wanted = train("ddp", half, by_torch=True)
        for strategy in STRATEGIES:
            tolerance = {"rel": 0.02, "abs": 0.02} if half else {"rel": 1e-4, "abs": 1e-5}
            assert first[f"{strategy}, {half}"] == pytest.approx(wanted, **tolerance), (strategy, half)
