"""A bit that flips on one rank is found by the digests of a loop, which name rank and parameter."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import photinus
from photinus.errors import ModelMismatchError
from photinus.trainer import unwrap
from tests.ranks import run_ranks, values
from tests.small_run import Net, points


def flip(rank: int, world_size: int, *, out: str, strategy: str, place: int, of_state: bool, wrong: int) -> str:
    every = 1 if strategy == "zero1" else 4  # there the owner's parameters go to all ranks in the next step
    with photinus.init(device="cpu", seed=3):
        plain = Net()
        model, optimizer = photinus.wrap(plain, torch.optim.Adam(plain.parameters(), lr=0.01), strategy=strategy)
        report = photinus.Reporting(progress=False, curves=False, digest_every=every)
        loop = photinus.Loop(model, optimizer, points(48), batch_size=12, steps=40, out=out, report=report)
        try:
            for inputs, targets in loop:
                loop.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                if loop.step == 6 and rank == wrong:
                    parameter = [*unwrap(model).parameters()][place]
                    tensor = optimizer.state[parameter]["exp_avg"] if of_state else parameter.data
                    tensor.view(torch.int32).view(-1)[0] ^= 1 << 12
        except ModelMismatchError as error:
            return f"step {loop.step}: {error}"
    return "not found"


@pytest.mark.parametrize(
    ("strategy", "place", "of_state", "wrong"),
    [("ddp", 0, False, 1), ("ddp", 3, True, 2), ("ddp", 5, True, 0), ("zero1", 4, False, 2)],
)
def test_a_flipped_bit_of_one_of_three_ranks_is_named(
    tmp_path: Any, strategy: str, place: int, of_state: bool, wrong: int
) -> None:
    arguments = {"out": str(tmp_path), "strategy": strategy, "place": place, "of_state": of_state, "wrong": wrong}
    function = f"{__name__}:flip"
    found = values(run_ranks(function, world_size=3, backend="photinus", arguments=arguments, timeout_s=90))
    name = [name for name, _ in Net().named_parameters()][place]
    # A wrong state makes all parameters wrong that are stepped with it: its own one.
    pattern = rf"step [6-8]: .*rank {wrong} .*parameter {re.escape(name)}"
    assert all(re.search(pattern, text) for text in found), found
