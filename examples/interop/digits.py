"""Shared by the scripts: 1797 real handwritten digits, a small network, and the command-line options."""

from __future__ import annotations

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows --backend and --epochs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--backend", default="photinus", help="photinus (default) or gloo: nothing else differs")
    parser.add_argument("--epochs", type=int, default=3, help="default 3")
    return parser


def digits() -> tuple[TensorDataset, TensorDataset]:
    """The training set (1437 samples) and the held-out set (360) of (image float32 [64] in 0..1, digit int64 [])."""
    pixels, numbers = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    images, targets = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(numbers)[order]
    return TensorDataset(images[:1437], targets[:1437]), TensorDataset(images[1437:], targets[1437:])


class Network(nn.Sequential):
    """[N, 64] -> [N, 10]; the same weights in every process that starts from the same seed."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(
            nn.Sequential(nn.Linear(64, 96), nn.SiLU()),
            nn.Sequential(nn.Linear(96, 96), nn.SiLU()),
            nn.Linear(96, 10),
        )


def check_world_size(size: int) -> None:
    """Exits unless the library trains with as many processes as the launcher started.

    On a machine without GPUs some libraries take each process for a training of its own, and all of them look fine.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if size != started:
        raise SystemExit(f"{started} processes were started, but the library trains with a world size of {size}")


def report(**numbers: float) -> None:
    """Prints numbers on rank 0, with all their digits, so that two runs can be compared."""
    if int(os.environ.get("RANK", "0")) == 0:
        print("result " + " ".join(f"{name}={number!r}" for name, number in numbers.items()), flush=True)
