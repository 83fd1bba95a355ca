"""The data: 1797 real handwritten digits of 8x8 pixels, written by 43 people, as they come inside scikit-learn.

To train on your own, return any two data sets with a length whose items are (image, target).
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
from pathlib import Path

import torch
from photinus.trainer import dataset_folder
from torch.utils.data import TensorDataset


def digits(folder: str | None = None) -> tuple[TensorDataset, TensorDataset]:
    """The training set (80 %) and the held-out set (20 %), cut once and for all by a fixed seed.

    Args:
        folder: where digits.csv.gz (65 numbers a line: 64 pixels 0..16 and the digit) lies; None: inside scikit-learn.

    Returns:
        Data sets of (image float32 [1, 8, 8] in 0..1, digit int64 []).
    """
    with gzip.open(dataset_folder(folder or _inside_scikit_learn()) / "digits.csv.gz", "rt") as file:
        table = torch.tensor([[float(cell) for cell in row] for row in csv.reader(file)])
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    images, targets = table[:, :-1].div(16).view(-1, 1, 8, 8), table[:, -1].long()
    cut = len(table) * 4 // 5
    return TensorDataset(images[:cut], targets[:cut]), TensorDataset(images[cut:], targets[cut:])


def _inside_scikit_learn() -> Path:
    """Return the path of scikit-learn's file, without importing it, which takes longer than reading the digits."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn, or give --dataset FOLDER")
    return Path(package.origin).parent / "datasets" / "data"
