"""Checks of what users give: numbers, data sets and DataLoaders; and the shortcut for tensors in memory."""

from __future__ import annotations

import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
    default_convert,
)
from torch.utils.data.distributed import DistributedSampler

from ...words import hint

P = ParamSpec("P")
R = TypeVar("R")


def explains_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Raise TypeError for options that a function does not have, with the name that is meant."""
    known = [name for name in inspect.signature(function).parameters if name[0] != "_"]
    shown = f"photinus.{function.__qualname__.removesuffix('.__init__')}"

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        # Before any value is looked at; all wrong names in one error.
        unknown = [each for each in kwargs if each not in known and each[0] != "_"]
        if unknown:
            lines = [f"{shown} has no option {name!r}.{hint(name, known, show=repr)}" for name in unknown]
            raise TypeError("\n".join(lines))
        return function(*args, **kwargs)

    return checked


class Checks:
    """Collects what is wrong with some arguments; see `checking`."""

    def __init__(self) -> None:
        self.errors: list[TypeError | ValueError] = []

    def __call__(self, is_right: Any, text: str, kind: type[TypeError | ValueError] = ValueError) -> None:
        """Note an error of this text and kind unless something is right."""
        if not is_right:
            self.errors.append(kind(text))

    def call(self, check: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Note the TypeError or ValueError that a function raises."""
        try:
            check(*args, **kwargs)
        except (TypeError, ValueError) as error:
            self.errors.append(error)


@contextmanager
def checking() -> Iterator[Checks]:
    """A block of checks, which raises at its end all that they noted as one error, a line for each."""
    # All in one: on a cluster each start that finds but one mistake costs minutes in a queue.
    checks = Checks()
    yield checks
    if len(checks.errors) == 1:
        raise checks.errors[0]
    if checks.errors:
        kind = TypeError if isinstance(checks.errors[0], TypeError) else ValueError
        raise kind("\n".join(map(str, checks.errors)))


def whole_number(name: str, value: Any, *, least: int = 0) -> int:
    """Return `value` as an int. It may have any integer type (numpy's too), but not bool or float."""
    # True is an int to Python, and 8.0 is none that could index: both are slips more often than meant.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} needs a whole number, not {value!r} ({type(value).__name__})")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name}={number} is too small: it needs to be at least {least}")
    return number


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} needs True or False, not {value!r}")


def check_seed(seed: Any) -> int:
    """Return `seed` as an int. Raises TypeError or ValueError unless it is a whole number with 0 <= seed < 2**63."""
    number = whole_number("seed", seed)
    if number >= 2**63:
        raise ValueError(f"seed={number} is too large: it needs to be below 2**63")
    return number


def check_place(place: Any) -> tuple[int, int]:
    """Return `place` as (rank, world_size). Raises TypeError or ValueError unless 0 <= rank < world_size."""
    if not (isinstance(place, tuple) and len(place) == 2):
        raise TypeError(f"place={place!r}: needs (rank, world_size)")
    rank, world_size = whole_number("rank", place[0]), whole_number("world_size", place[1], least=1)
    # With a wrong world size samples would be left out or done twice, and nothing would show it.
    if rank >= world_size:
        raise ValueError(f"rank={rank} does not exist in a world of {world_size}: ranks go from 0 to {world_size - 1}")
    return rank, world_size


def check_dataset(dataset: Any) -> None:
    """Raise TypeError for an object that cannot be divided among ranks, or found again after a resume."""
    # The commonest slip in scripts that read a path from the command line; a text has a length and items, too.
    if isinstance(dataset, (str, os.PathLike)):
        path = Path(dataset)
        absent = "" if path.exists() else f" (and it does not exist, seen from {Path.cwd()})"
        raise TypeError(
            f"{str(path)!r} is a path, not a dataset{absent}: open it with a class that has __len__ and __getitem__ (a "
            f"folder of images, say, with torchvision.datasets.ImageFolder) and give that to the loader"
        )
    # ImageFolder for ImageFolder(path): a class has __len__ and __getitem__, too, and would fail only in a worker.
    if isinstance(dataset, type):
        raise TypeError(f"a dataset is needed; this is the class {dataset.__name__}, not an object of it")
    missing = [] if hasattr(dataset, "__len__") else ["__len__"]
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
        missing.append("__getitem__")
    if missing:
        raise TypeError(
            f"a dataset needs __len__ and __getitem__; {type(dataset).__name__} has no {' and no '.join(missing)}"
        )


def taken_apart(data_loader: DataLoader[Any]) -> tuple[Dataset[Any], dict[str, Any], dict[str, Any]]:
    """Return a DataLoader's data set, its settings as arguments of `photinus.loader`, and its options for workers.

    Its batch size counts as that over all ranks: the script was written for one process. Under a DistributedSampler it
    is that of one rank, and its seed that of the order of the samples, which else is drawn from the loop's seed.

    Raises:
        TypeError: its class iterates in a way of its own, or its sampler chooses in one, which cannot be divided among
            ranks or found again.
    """
    kind = type(data_loader)
    # Only data set and settings are taken; what a subclass does while it iterates would be left out in silence.
    for verb in ("__iter__", "__len__", "_get_iterator"):
        if getattr(kind, verb) is not getattr(DataLoader, verb):
            raise TypeError(
                f"this {kind.__name__} is a DataLoader with {verb} of its own, and what that does would be left out. "
                f"Give its data set (data_loader.dataset) with batch_size=... over all ranks, and do the rest in the "
                f"data set, in collate_fn or in the loop's body."
            )
    # What is not looked at (pin_memory, generator) decides nothing of the result: the order is drawn here.
    dataset, sampler, batch_size = data_loader.dataset, data_loader.sampler, data_loader.batch_size
    replaces = isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(sampler.data_source)
    )
    # Of these it is known which samples they choose, so that their order can be drawn here, for any number of ranks.
    known = type(sampler) in (SequentialSampler, RandomSampler, SubsetRandomSampler, DistributedSampler)
    source: Any = getattr(sampler, "dataset" if isinstance(sampler, DistributedSampler) else "data_source", dataset)
    sizes = [len(each) for each in (source, dataset) if isinstance(each, Sized)]
    other = len(set(sizes)) > 1
    if not isinstance(dataset, IterableDataset) and (batch_size is None or replaces or not known or other):
        own = sampler if batch_size is not None else data_loader.batch_sampler
        over = f" over {sizes[0]} of {sizes[1]} samples" if other and own is sampler else ""
        what = "no batches (batch_size=None)" if own is None else f"a sampler of its own ({type(own).__name__}{over})"
        raise TypeError(
            f"this DataLoader has {what}: what it chooses cannot be divided among ranks, or found again after a "
            f"resume. Give photinus.loader its data set (data_loader.dataset) with batch_size=... over all ranks, and "
            f"collate_fn, num_workers and shuffle beside it; a choice of samples (weights, a filter) belongs into the "
            f"data set, as with torch.utils.data.Subset."
        )
    shuffle = type(sampler) is not SequentialSampler and not isinstance(dataset, IterableDataset)
    # Its choice is part of the data set here; its order, drawn from torch's global generator, is not taken.
    if isinstance(sampler, SubsetRandomSampler):
        dataset = Subset(dataset, [int(index) for index in sampler.indices])
    if isinstance(sampler, DistributedSampler):
        batch_size, shuffle = batch_size and batch_size * sampler.num_replicas, sampler.shuffle
    found = {
        "batch_size": batch_size,
        "shuffle": shuffle,
        "drop_last": data_loader.drop_last,
        "seed": sampler.seed if isinstance(sampler, DistributedSampler) else None,
        "num_workers": data_loader.num_workers,
        # Without batches torch only converts; here there are some.
        "collate_fn": None if data_loader.collate_fn in (default_collate, default_convert) else data_loader.collate_fn,
    }
    names = ("persistent_workers", "prefetch_factor", "worker_init_fn", "multiprocessing_context", "timeout")
    return dataset, found, {name: getattr(data_loader, name) for name in names}


def indexable(dataset: Any) -> Callable[[list[int]], list[torch.Tensor]] | None:
    """Return a function from indices to a collated batch, for a TensorDataset, plain or inside Subsets.

    Return None for everything else, also for subclasses of the two, which may do more than index.
    """
    subsets: list[Any] = []  # read at each batch: what they hold may be replaced between epochs
    # Not isinstance: a subclass may do more in __getitem__ than to index, such as to augment.
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset:
        return None

    def batch(indices: list[int]) -> list[torch.Tensor]:
        tensors = dataset.tensors
        for subset in subsets:
            indices = [int(subset.indices[index]) for index in indices]
        rows = torch.tensor(indices, dtype=torch.int64, device="cpu")
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        rows = rows.pin_memory() if on_gpu else rows  # else the copy would wait for all that is queued on the GPU
        places = {t.device: rows.to(t.device, non_blocking=t.is_cuda) for t in tensors}
        return [tensor[places[tensor.device]] for tensor in tensors]

    return batch
