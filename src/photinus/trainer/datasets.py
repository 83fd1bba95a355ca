"""What can be a dataset here, and the shortcut for those that are tensors in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

__all__ = ["check_dataset", "indexable"]


def check_dataset(dataset: Any) -> None:
    """Refuses what cannot be divided among ranks and found again after a resume.

    Raises:
        FileNotFoundError: a path at which there is nothing.
        TypeError: anything without __len__ and __getitem__ (or __getitems__); the message says what to do.
    """
    if isinstance(dataset, (str, os.PathLike)):
        path = Path(dataset)
        if not path.exists():
            raise FileNotFoundError(f"there is no dataset at {str(path)!r}, seen from {Path.cwd()}: is the path right?")
        raise TypeError(
            f"{str(path)!r} is a path, not a dataset: open it with a class that has __len__ and __getitem__ (a folder "
            f"of images, say, with torchvision.datasets.ImageFolder) and give that to the loader"
        )
    if isinstance(dataset, DataLoader):
        raise TypeError("this is a DataLoader already: give its .dataset, and the batch size over all ranks")
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{type(dataset).__name__} is an IterableDataset, whose samples cannot be divided among ranks or found "
            f"again after a resume: give it __len__ and __getitem__ (a map-style dataset), or iterate over it yourself "
            f"with each rank reading its own part"
        )
    if isinstance(dataset, type):
        raise TypeError(f"a dataset is needed; this is the class {dataset.__name__}, not an object of it")
    missing = [] if hasattr(dataset, "__len__") else ["__len__"]
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
        missing.append("__getitem__")
    if missing:
        raise TypeError(
            f"a dataset needs __len__ and __getitem__; {type(dataset).__name__} has no {' and no '.join(missing)}"
        )


def indexable(dataset: Any) -> Callable[[list[int]], list[torch.Tensor]] | None:
    """For a TensorDataset, plain or inside Subsets: a function from indices to what default_collate makes of them.

    None for everything else, subclasses of the two included, which may do more than index.
    """
    maps: list[Sequence[int]] = []
    while type(dataset) is Subset:
        maps.append(dataset.indices)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None
    tensors = dataset.tensors

    def batch(indices: list[int]) -> list[torch.Tensor]:
        for chosen in maps:
            indices = [int(chosen[index]) for index in indices]
        rows = torch.tensor(indices, dtype=torch.int64, device="cpu")
        return [tensor[rows.to(tensor.device)] for tensor in tensors]

    return batch
