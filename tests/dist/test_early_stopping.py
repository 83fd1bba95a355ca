"""Early stopping is one decision of all ranks, also where only rank 0 knows the metric."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import photinus
from tests.ranks import run_ranks, values
from tests.small_run import QUIET, Net, points

VALUES = (0.5, 0.6, 0.55, 0.58, 0.9)


def train(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    with photinus.init("auto", "cpu", seed=1):
        for strategy, every in (("ddp", None), ("zero3", 2)):
            net = Net(0.0)
            model, optimizer = photinus.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1), strategy=strategy)
            stopping = photinus.EarlyStopping("right", patience=2)
            loop = photinus.Loop(
                model, optimizer, points(), batch_size=12, epochs=9, state={"stopping": stopping}, report=QUIET,
                validate_every_steps=every,
            )  # fmt: skip
            for inputs, targets in loop:
                loop.backward(cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                if loop.validation_due and rank == 0:
                    loop.log(right=VALUES[len(loop.history)])
                elif loop.validation_due and rank == 1:
                    loop.log(right=0.1 + len(loop.history))
            found.append([loop.step, len(loop.history), stopping.best, stopping.rows, stopping.stopped])
        for patience in (2, 2 + rank):
            try:
                loop = photinus.Loop(
                    model, optimizer, points(), batch_size=12, epochs=1, report=QUIET,
                    state={"stopping": photinus.EarlyStopping("right", patience=patience)},
                )  # fmt: skip
                for inputs, targets in loop:
                    loop.backward(cross_entropy(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
            except (ValueError, photinus.errors.PhotinusError) as error:
                found.append(str(error))
    return found


@pytest.mark.timeout(90)
def test_all_ranks_stop_at_the_same_step_by_what_rank_0_knows() -> None:
    function = "tests.dist.test_early_stopping:train"
    first, *others = values(run_ranks(function, world_size=3, backend="photinus", timeout_s=80))
    why = "right did not rise above 0.6000 in the last 2 rows"
    assert first[:2] == [[16, 4, 0.6, 2, why], [8, 4, 0.6, 2, why]]
    assert [each[:2] for each in others] == [first[:2]] * 2
    assert all("the row of step 4 has no 'right'; it has elapsed_s," in each[2] for each in (first, *others))
    assert all("the ranks were given different loops: stopping=EarlyStopping('right', pat" in x[3] for x in (first,))
