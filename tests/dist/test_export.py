"""Checkpoints of every strategy give the same file of weights, in a process without ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

import photinus
from photinus.cli.main import main
from tests.ranks import run_ranks
from tests.small_run import QUIET, Net, points

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def train_with_each(rank: int, world_size: int, out: str) -> None:
    for strategy in STRATEGIES:
        with photinus.init("gloo", "cpu", seed=1):
            model = Net(dropout=0.0)
            average = AveragedModel(model)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            wrapped, optimizer = photinus.wrap(model, optimizer, strategy=strategy)
            if strategy in ("zero2", "zero3"):
                average.module = photinus.wrap(average.module, strategy=strategy)
            options: dict[str, Any] = {"out": Path(out, strategy), "state": {"ema": average}, "report": QUIET}
            loop = photinus.Loop(wrapped, optimizer, points(), batch_size=8, epochs=1, **options)
            for inputs, targets in loop:
                loop.backward(cross_entropy(wrapped(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(photinus.unwrap(wrapped))


def test_checkpoints_of_every_strategy_are_exported_without_ranks(tmp_path: Path) -> None:
    run_ranks("tests.dist.test_export:train_with_each", world_size=2, backend="gloo", arguments={"out": str(tmp_path)})
    for flags in ([], ["--average", "ema"]):
        files = {name: tmp_path / f"{name}{len(flags)}.safetensors" for name in STRATEGIES}
        assert [main(["export", str(tmp_path / name), "-o", str(path), *flags]) for name, path in files.items()] == [
            0
        ] * 4
        first, *others = (load_file(path) for path in files.values())
        assert first.keys() == Net().state_dict().keys()
        for other in others:
            torch.testing.assert_close(other, first)
