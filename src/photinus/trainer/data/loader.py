"""Batches of a dataset for this rank: shuffled, resumable, the same at every world size.

`loader` makes a Loader; `photinus.Loop` and the Trainer use one. In a loop of your own:

    batches = photinus.loader(train_set, batch_size=64, num_workers=4)
    for epoch in range(15):
        for x, y in batches:            # a new order each epoch; nothing to call in between
            ...
        photinus.save("last.pt", model=model, optimizer=optimizer, loader=batches)  # with its place: load it, too

torch's DataLoader does the fetching (worker processes, pinned memory); which samples, in which order, with which
random seeds and from which batch on is decided here and in sampler.py.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import default_collate as torch_collate

from ... import env
from ...errors import PhotinusError
from ...job.world import World
from ...parallel.ddp.sync_batch_norm import Part
from ...parallel.exchange.agreement import JSON, check_alike, place_in_group, together
from ...parallel.exchange.tensors import map_tensors, move_tensors
from . import rng
from .arguments import (
    check_dataset,
    check_flag,
    check_place,
    check_seed,
    explains_unknown,
    indexable,
    taken_apart,
    whole_number,
)
from .same_data import compare_descriptions, compare_samples
from .sampler import ORDER, GlobalBatches, LocalBatch, ShardBatches, ShardedOnce
from .stream import Piece, ShardReader, State, StreamShards, StreamShares, agreeing, is_stream
from .workers import BatchRequest, Fetch, explaining, make_data_loader, start_workers

T = TypeVar("T")

_SETTINGS = ("batch_size", "shuffle", "drop_last", "collate_fn", "num_workers", "shards")
_LATE_S = 30.0  # a sample that is only to be compared

_loaded: str | None = None  # file from which `photinus.load` restored an optimizer to continue a training
_running: list[Loader] = []  # loaders whose plain pass has not ended; the last one yielded the present batch
_in_pass: weakref.WeakSet[Loader] = weakref.WeakSet()  # training loaders
_warned_of_weights = _warned_of_twins = False


def running_weight() -> float:
    """The weight of the batch that a plain pass handed out last, while its pass runs; else 1."""
    return _running[-1].weight if _running else 1.0


def note_loaded(path: str) -> None:
    """Note that a training continues from this file: loaders that start at epoch 0 warn of it."""
    global _loaded
    _loaded = path


@dataclass(frozen=True)
class Batch:
    """One local batch and its place in the global one.

    Attributes:
        data: what the collate function made, on the loader's device.
        weight: factor for this rank's mean loss that makes the mean over ranks that over all samples of the global
            batch. It is 1.0 unless the batch is split unevenly.
        samples: number of this rank's samples; 0 if a short batch or its shards of a stream have none left for it (it
            then has some that do not count).
        global_samples: number of samples of all ranks.
        index: number of the global batch within its epoch.
        to_come: number of batches left in the epoch; of a stream at most the number that is read ahead.
    """

    data: Any
    weight: float
    samples: int
    global_samples: int
    index: int
    to_come: int = 0


@explains_unknown
def loader(
    dataset: Dataset[Any] | Sequence[Any] | DataLoader[Any] | Loader,
    *,
    batch_size: int | None = None,
    train: bool = True,
    shuffle: bool | int | None = None,
    drop_last: bool | None = None,
    seed: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int | None = None,
    shards: int | None = None,
    device: torch.device | str | None = None,
    place: tuple[int, int] | None = None,
) -> Loader:
    """Return a loader of this rank's share of a dataset, in batches.

    Args:
        dataset: an object with __len__ and __getitem__ (or __getitems__), or torch's DataLoader over one. The
            DataLoader's settings are used for arguments that are None here, and so are those that torch alone has:
            persistent_workers, prefetch_factor, worker_init_fn (torch's get_worker_info().dataset.dataset is yours),
            multiprocessing_context, timeout (default: PHOTINUS_TIMEOUT_S, 300 s). Its batch size is that of all ranks
            together; with a DistributedSampler, that of each rank. Or a stream, without __len__: an iterable (which is
            split if it has `shard(num_shards, index)`, and resumes faster if it has state_dict and load_state_dict), or
            a function of (shard, shards) that returns one.
        batch_size: samples of a step over all ranks; for training at least one per rank. If it cannot be divided
            evenly, the ranks' parts differ by one sample and have weights: see `Loader.weight`.
        train: False for validation: the dataset's order, every sample exactly once over all ranks, without padding.
            Ranks may then differ by one in their number of batches. `shuffle` and `drop_last` do not apply.
        shuffle: use a new order in each epoch, which depends only on (seed, epoch). Default: as `train`. Of a stream:
            shuffle in a buffer of N samples of each shard (True: 1000). Default: the stream's own order.
        drop_last: leave out the last, short batch of an epoch. Default: False, as in torch. Ranks for which it has no
            sample take part with a weight of 0.
        seed: seed of the order, and of Python's, numpy's and torch's generators in __getitem__ and the collate
            function. Each sample has a seed from (seed, epoch, sample); __getitems__ and collate functions have one per
            batch. Default: that of the `photinus.init` before, else 0; for the order, that of a DistributedSampler.
        collate_fn: function that makes a batch of a list of samples. Default: torch's default_collate.
        num_workers: number of processes that load data, per rank. Default: 0. A TensorDataset (or a Subset of one) is
            indexed in this process, which is faster, unless there is a collate function.
        shards: number of parts into which a stream is cut, over all ranks. A worker reads whole shards. With the same
            number, any number of ranks has the same samples in the same steps. Default: the number of ranks at the
            run's start, or the stream's `num_shards` if that is smaller.
        device: device to which the tensors of a batch move, through pinned memory if it is a GPU. Default: they do not
            move; a `photinus.Loop` moves them to its own.
        place: (rank, world_size) of the ranks that share the dataset. Default: torch.distributed's if it is
            initialized, else the launcher's. (0, 1) gives the whole dataset to this rank alone.

    All ranks of a process group call it together, unless `place` has fewer: they compare their settings, and a few
    samples of their data. Of a stream they compare, in each epoch, the first sample of a shard that several read.

    Raises:
        TypeError: not a dataset, or a stream for validation; an argument has a wrong type, or no function has it; or
            batch_size is missing.
        ValueError: batch size, world size and dataset do not fit each other; or the ranks have different data.
    """
    settings: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    settings |= {"collate_fn": collate_fn, "num_workers": num_workers, "shards": shards}
    ranks = place_in_group()[1]
    is_shared = ranks > 1 and (place is None or (isinstance(place, tuple) and place[1:] == (ranks,)))
    with together("making a loader") if is_shared else nullcontext():
        batches = make_loader(dataset, train=train, seed=seed, device=device, place=place, **settings)
    if is_shared:
        alike: dict[str, JSON] = {"train": train, "samples": batches.samples, "batch_size": batches.batch_size}
        if train:
            shares = batches.shares
            alike |= {"seed": batches.order_seed, "shuffle": shares.shuffle, "drop_last": shares.drop_last}
            alike["shards"] = batches.shards
        check_alike(alike, "the ranks were given different loaders")
        batches.compare_samples("training data" if train else "data")
    return batches


def make_loader(
    dataset: Any,
    *,
    train: bool = True,
    seed: int | None = None,
    device: torch.device | str | None = None,
    place: tuple[int, int] | None = None,
    **settings: Any,
) -> Loader:
    """Return a loader as `loader` does, without an exchange with the other ranks."""
    settings = {**dict.fromkeys(_SETTINGS), **settings}
    found: Mapping[str, Any] = {}
    of_workers: Mapping[str, Any] = {}
    if isinstance(dataset, DataLoader):
        dataset, found, of_workers = taken_apart(dataset)
    elif isinstance(dataset, Loader):
        dataset, found, of_workers = dataset.dataset, dataset.settings, dataset.of_workers
    if found:
        # What is given here counts, else what the DataLoader was given.
        settings = {name: found.get(name) if value is None else value for name, value in settings.items()}
        settings["shuffle"] = settings["shuffle"] if train else None
    streams = is_stream(dataset)
    if not streams:
        check_dataset(dataset)
    if settings["batch_size"] is None:
        raise TypeError("batch_size is missing: the samples of one step over all ranks")
    # Before a group is made, only the launcher knows; afterwards the group is right, whatever started it.
    if place is None:
        world = World.from_env()
        place = place_in_group() if dist.is_initialized() else (world.rank, world.world_size)
    rank, world_size = check_place(place)
    collate_fn = settings["collate_fn"]
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn needs a function that takes a list of samples, not {collate_fn!r}")
    kind, shards = type(dataset).__name__, settings["shards"]
    if streams and not train:
        raise TypeError(f"{kind} has no length, which validation needs: give a list of samples (itertools.islice)")
    if shards is not None and not streams:
        raise TypeError(f"shards={shards} is for streams, but {kind} has a length: leave shards out")
    if not train and settings["shuffle"]:
        raise ValueError("shuffle=True with train=False: validation counts each sample once, in the dataset's order")
    for name in ("drop_last",) if streams else ("drop_last", "shuffle"):
        if settings[name] is not None:
            check_flag(name, settings[name])
    batch_size = settings["batch_size"] = whole_number("batch_size", settings["batch_size"], least=1)
    settings["num_workers"] = whole_number("num_workers", settings["num_workers"] or 0)
    order = found.get("seed") if seed is None else seed  # a DistributedSampler has one
    seed = check_seed(rng.session_seed if seed is None else seed)
    order = seed if order is None else check_seed(order)
    shares: GlobalBatches | ShardedOnce | StreamShares
    if streams:
        shares = StreamShares(
            dataset, batch_size, rank=rank, world_size=world_size, seed=seed,
            shards=None if shards is None else whole_number("shards", shards, least=1),
            shuffle=settings["shuffle"] or False, drop_last=settings["drop_last"] is True,
        )  # fmt: skip
        if world_size > 1 and place_in_group() != place:
            advice = "call photinus.init() before, and leave place out"
            raise ValueError(f"place={place}: ranks agree by torch.distributed on the end of a stream: {advice}")
        shares.note(settings["num_workers"])
    elif train:
        shares = GlobalBatches(
            len(dataset), batch_size, rank=rank, world_size=world_size, seed=order,
            shuffle=settings["shuffle"] is not False, drop_last=settings["drop_last"] is True,
        )  # fmt: skip
    else:
        shares = ShardedOnce(len(dataset), batch_size, rank=rank, world_size=world_size)
    return Loader(dataset, shares, settings, seed, None if device is None else torch.device(device), of_workers)


class Loader:
    """This rank's batches of a dataset; made by `loader`.

    `for data in loader` is one pass: it counts its own epochs. In a script that is started again they have to go on:
    give the loader to `photinus.save` and `photinus.load` (inside an epoch, too), or call `set_epoch(k)` before each
    pass. Call it also where a script saves after a `break` and means to go on with the next epoch: what is saved is the
    place behind the last batch, and a resumed pass goes on there. `epoch(k, start=i)` is any batch of any epoch,
    without loading what comes before.

    Attributes:
        dataset: the user's.
        batch_size: samples per step over all ranks.
        samples: size of the dataset; 0 for a stream.
        shares: this rank's part of the samples.
        device: device to which the tensors move, or None.
        settings, of_workers: arguments of `loader`, and options of a DataLoader for its workers.
    """

    def __init__(
        self,
        dataset: Any,
        shares: GlobalBatches | ShardedOnce | StreamShares,
        settings: Mapping[str, Any],
        seed: int,
        device: torch.device | None,
        of_workers: Mapping[str, Any],
    ) -> None:
        self.dataset, self.shares, self.seed, self.device = dataset, shares, seed, device
        self.settings, self.of_workers = settings, of_workers
        self.batch_size: int = settings["batch_size"]
        self.samples = shares.samples
        self._timeout_s: float = of_workers.get("timeout") or env.TIMEOUT_S.get()
        collate_fn = settings["collate_fn"]
        # A collate function may do anything with the items, so that they have to be made one by one.
        self._tensors = indexable(dataset) if collate_fn is None else None
        self._fetch = Fetch(dataset, collate_fn or torch_collate, seed)
        self._num_workers: int = settings["num_workers"]
        self._workers: DataLoader[Any] | None = None  # kept from pass to pass when the workers are persistent
        self._requests = _Requests()
        self._thread = threading.get_ident()
        self._passes = 0
        self._next = (0, 0)  # epoch and first batch of the next plain pass
        self._position = (0, 0)  # the batch that a plain pass hands out next
        self._is_placed = False  # by `set_epoch` or `load_state_dict`
        self._weight, self._weight_used = 1.0, True  # of the batch that a plain pass handed out last
        # Of a stream: the states of the shards by epoch and number of batches done, of the last two places.
        self._places: dict[tuple[int, int], Mapping[int, State]] = {}

    def cut_into_shards(self, own: range, shards: int, accumulate: int) -> None:
        """Give out, of each global batch, this rank's logical shards one by one; see `ShardBatches`.

        Raises:
            ValueError: a batch has too few samples.
        """
        if isinstance(self.shares, StreamShares):
            self.shares = StreamShards(self.shares, own, shards, accumulate)
            return
        assert isinstance(self.shares, GlobalBatches), "a Loop refuses data for validation"
        self.shares = ShardBatches(self.shares, own, shards, accumulate)

    def __len__(self) -> int:
        """Return the number of batches of one epoch on this rank; for training it is the same on every rank."""
        return len(self.shares)

    def __iter__(self) -> Iterator[Any]:
        """Yield the data of the next epoch. Each pass is a new epoch, even if the last one was not finished."""
        self._warn_of_the_first_epoch()
        return self._plain()

    def epoch(self, epoch: int, start: int = 0, *, look_ahead: int = 1) -> Iterator[Batch]:
        """Yield the batches of `epoch` (0, 1, ...) from batch `start` on. Earlier batches are not loaded.

        Args:
            look_ahead: batches of a stream to read ahead. Only the next batch shows whether a batch is the last one.

        Raises:
            TypeError, ValueError: not whole numbers, below 0, or `start` is beyond the epoch's end (the end itself
                gives no batches).
        """
        epoch, start = whole_number("epoch", epoch), whole_number("start", start)
        if isinstance(self.shares, StreamShares):
            return self._streams(self.shares, epoch, start, look_ahead)
        if len(self.dataset) != self.samples:
            raise ValueError(
                f"the data set had {self.samples} samples when the loader was made, and has {len(self.dataset)} now: "
                f"make another loader, at the end of an epoch"
            )
        if start > self.shares.parts:
            raise ValueError(f"start={start} is beyond the end of the epoch, which has {self.shares.parts} batches")
        return self._slices(epoch, start) if self._tensors is not None else self._fetches(epoch, start)

    @property
    def weight(self) -> float:
        """Return the weight of this rank's mean loss in the global batch, for the last batch of a plain pass.

        `photinus.backward(loss)` multiplies by it. It is 1.0 if all ranks have the same number of samples.
        """
        self._weight_used = True
        return self._weight

    def set_epoch(self, epoch: int) -> None:
        """Set the `epoch` (0, 1, ...) of the next plain pass. A position inside it that was loaded stays.

        Raises:
            TypeError, ValueError: not a whole number, or below 0.
        """
        epoch, self._is_placed = whole_number("epoch", epoch), True
        # Scripts call it at each epoch's begin, also right after a resume inside that epoch, whose place must stay.
        if epoch != self._next[0]:
            self._next = self._position = (epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the plain pass, for `photinus.save`: epoch, next batch, and what that depends on."""
        place = {"epoch": self._position[0], "batch": self._position[1], **self._identity()}
        stream = self.stream_state(*self._position)
        return place if stream is None else {**place, "stream": stream}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the next plain pass at the position in `state`, inside the epoch.

        Raises:
            ValueError: `state` is inside an epoch of a different dataset size, batch size, order or seed; or with
                train=False of a different number of ranks.
        """
        epoch, batch = whole_number("epoch", state["epoch"]), whole_number("batch", state["batch"])
        self.load_stream(state.get("stream"), epoch, batch)
        wanted, found = self._identity(), {"sample_order": 1, **state}
        # Between epochs anything may change; inside one, the rest would repeat or skip samples.
        names = [name for name in wanted if wanted[name] != found.get(name)]
        if batch and names:
            changes = ", ".join(f"{name} was {found.get(name)} and is {wanted[name]}" for name in names)
            raise ValueError(
                f"the saved run stopped at batch {batch} of epoch {epoch}, which cannot be found again: {changes}"
            )
        is_over = not isinstance(self.shares, StreamShares) and batch >= len(self)
        self._next = self._position = (epoch + 1, 0) if is_over else (epoch, batch)
        self._is_placed = True

    def compare_samples(self, what: str) -> None:
        """Raise ValueError on all ranks of the group if a few samples of their data differ. All ranks call it."""
        if place_in_group()[1] > 1 and not isinstance(self.shares, StreamShares):
            compare_samples(what, self.dataset, self._described)

    def _compare_streams(self, shares: StreamShares, pieces: Sequence[Piece]) -> None:
        """Raise ValueError on all ranks if those that read the same shard have different first samples of it."""
        first = {number: one for piece in pieces for number, one in piece.first.items()}
        if place_in_group()[1] > 1 and shares.world_size > 1:
            of = f"of {shares.shards} of {type(self.dataset).__name__}"
            own = {f"the first sample of shard {number} {of}": one for number, one in first.items()}
            compare_descriptions("data", own if env.COMPARE_DATA.get() else {})

    def warn_of_single_samples(self, models: Iterable[torch.nn.Module]) -> None:
        """Warn if an epoch's last batch has one sample for some rank, and a batch norm that needs two would raise."""
        shares = self.shares
        if not isinstance(shares, GlobalBatches) or shares.fewest_samples > 1:
            return
        if any(isinstance(each, torch.nn.BatchNorm1d) for model in models for each in model.modules()):
            warnings.warn(
                f"the last batch of each epoch ({self.samples % self.batch_size} samples: {self.samples} by "
                f"batch_size={self.batch_size}) has one sample for some rank or shard. BatchNorm1d needs two, and "
                f"raises an error there: use drop_last=True or another batch_size",
                stacklevel=4,
            )

    def _described(self, requests: Sequence[BatchRequest], describe: Callable[[list[Any]], T]) -> Iterator[T]:
        """Yield what a function makes of some samples; where workers load the data, one of them fetches the samples."""
        fetch = Fetch(self.dataset, describe, 0)
        if self._tensors is not None or not self._num_workers:
            return (fetch[request] for request in requests)
        options = {**self.of_workers, "persistent_workers": False}
        return start_workers(make_data_loader(fetch, requests, 1, min(self._timeout_s, _LATE_S), options))

    @property
    def order_seed(self) -> int:
        """Return the seed of the order of samples; other random numbers have `seed`."""
        return self.seed if isinstance(self.shares, ShardedOnce) else self.shares.seed

    @property
    def shards(self) -> int:
        """Return the number of shards into which the stream is cut; 0 for a data set with a length."""
        return self.shares.shards if isinstance(self.shares, StreamShares) else 0

    def stream_state(self, epoch: int, batch: int) -> dict[str, Any] | None:
        """Return the number of shards, and the states of those that this rank reads; None without a stream."""
        if not isinstance(self.shares, StreamShares):
            return None
        return {"shards": self.shares.shards, "states": dict(self._places.get((epoch, batch), {}))}

    def load_stream(self, state: Mapping[str, Any] | None, epoch: int, batch: int) -> None:
        """Cut the stream as `state` says, and begin there if that place is asked for. Raises ValueError."""
        shares = self.shares
        if not isinstance(shares, StreamShares) or state is None:
            return
        if shares.is_given and batch and shares.shards != state["shards"]:
            where = f"batch {batch} of epoch {epoch} of a stream in {state['shards']} shards"
            raise ValueError(f"the saved run stopped at {where}, and shards={shares.shards} now: set it back")
        if not shares.is_given and shares.shards != state["shards"]:
            shares.cut(state["shards"])
            shares.note(self._num_workers)
        self._places = {(epoch, batch): state["states"]}

    def _warn_of_the_first_epoch(self) -> None:
        """Warn, on rank 0 and once, that a training continues but the order of its samples starts over."""
        if _loaded is None or self._is_placed or isinstance(self.shares, ShardedOnce):
            return
        self._is_placed = True
        if self.shares.rank == 0:
            warnings.warn(
                f"photinus.load brought back an optimizer from {_loaded}, but not the place of this loader, which "
                f"starts again at epoch 0, in the order of the first epoch. Save it, too: photinus.save(..., "
                f"loader=loader), photinus.load(..., loader=loader); or call loader.set_epoch(epoch) before each epoch",
                stacklevel=3,
            )

    def _identity(self) -> dict[str, Any]:
        found: dict[str, Any] = {"samples": self.samples, "batch_size": self.batch_size, "seed": self.order_seed}
        # Without training, ranks take parts of the data set, and not of each batch.
        parts = {"world_size": self.shares.world_size} if isinstance(self.shares, ShardedOnce) else {}
        order = {"sample_order": ORDER} if self.samples and not parts else {}
        return {**found, "shuffle": self.shares.shuffle, **order, **parts}

    def _plain(self) -> Iterator[Any]:
        epoch, start = self._next  # not in iter(): a checkpoint may be loaded between that and the first batch
        self._next = (epoch + 1, 0)  # counted here and not at the pass's end: one that is left early is over, too
        self._position = (epoch, start)
        self._warn_of_another_thread()
        note_place("")
        if not isinstance(self.shares, ShardedOnce):
            rng.set_ranks_apart(self.shares.rank)
            self._warn_of_a_twin()
        done, before = start, bool(_running) or Part.is_counted  # a Loop's body may read a second loader
        try:
            for batch in self.epoch(epoch, start):
                done = batch.index + 1
                self._position = (epoch, done) if batch.to_come else (epoch + 1, 0)
                # Equal parts have the weight 1.0, which nobody needs to use.
                self._weight, self._weight_used = batch.weight, batch.weight == 1.0
                Part.is_counted = batch.samples > 0
                _running[:] = [*(each for each in _running if each is not self), self]
                yield batch.data
                self._warn_of_unused_weight()
            self._position = (epoch + 1, 0)
        finally:
            _in_pass.discard(self)
            _running[:] = [each for each in _running if each is not self]
            Part.is_counted = _running[-1]._weight > 0 if _running else before
            of = "" if isinstance(self.shares, StreamShares) else f" of {len(self)}"
            note_place(f"{done}{of} batches of an epoch of its loader")

    def _warn_of_a_twin(self) -> None:
        """Warn, once, of two loaders that are read side by side (for mixup or two views) and give the same samples."""
        global _warned_of_twins
        twins = [each for each in _in_pass if each.dataset is self.dataset and each.order_seed == self.order_seed]
        _in_pass.add(self)
        if twins and self.shares.rank == 0 and self.shares.shuffle and not _warned_of_twins:
            _warned_of_twins = True
            warnings.warn(
                "two loaders over one data set are read side by side, and have one seed: both give the same samples "
                "in the same order, with the same augmentation. Give one of them another seed=...",
                stacklevel=4,
            )

    def _warn_of_unused_weight(self) -> None:
        """Warn, on rank 0 and once, that gradients are not those of the global batch."""
        global _warned_of_weights
        if not self._weight_used and not _warned_of_weights and not isinstance(self.shares, ShardedOnce):
            _warned_of_weights = True
            if self.shares.rank == 0:
                warnings.warn(
                    f"a batch of batch_size={self.batch_size} over {self.shares.world_size} ranks gives some of them "
                    f"more samples, and nothing weighted this rank's mean loss by {self._weight:.4g}, so that the "
                    f"gradient was not the global batch's: call photinus.backward(loss, weight=loader.weight)",
                    stacklevel=3,
                )

    def _warn_of_another_thread(self) -> None:
        """Warn, once, that samples are fetched beside training and share its random numbers."""
        if self._num_workers == 0 and self._tensors is None and self._thread not in (0, threading.get_ident()):
            self._thread = 0
            warnings.warn(
                f"another thread than the one that made this loader takes its batches (thread "
                f"{threading.current_thread().name}), and num_workers=0: samples and training then share random "
                f"numbers, so that neither dropout nor augmentation is what it was. Use num_workers=1",
                stacklevel=3,
            )

    @property
    def _pins(self) -> bool:
        return self.device is not None and self.device.type == "cuda" and torch.cuda.is_available()

    def _moved(self, data: Any, *, is_pinned: bool = False) -> Any:
        if self.device is None or (type(data) is list and all(getattr(t, "device", 0) == self.device for t in data)):
            return data
        data = pin_memory(data) if self._pins and not is_pinned else data
        return move_tensors(data, self.device)

    def _batch(self, data: Any, local: LocalBatch, index: int, *, is_pinned: bool = False) -> Batch:
        assert not isinstance(self.shares, StreamShares)
        data = self._moved(data, is_pinned=is_pinned)
        return Batch(data, local.weight, local.samples, local.global_samples, index, self.shares.parts - index - 1)

    def _slices(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield batches that are indexed out of tensors in memory: the values of a loop over samples, faster."""
        assert self._tensors is not None
        assert not isinstance(self.shares, StreamShares)
        for index in range(start, self.shares.parts):
            local = self.shares.batch(epoch, index)
            data = self._tensors(local.indices)
            yield self._batch(data, local, index)

    def _fetches(self, epoch: int, start: int) -> Iterator[Batch]:
        requested: deque[LocalBatch] = deque()
        shares = self.shares  # not self: a cycle, when collected, waits 5 s for each worker
        assert not isinstance(shares, StreamShares)

        def requests() -> Iterator[BatchRequest]:
            # Remembered in the order of the requests, in which torch's DataLoader hands the batches out.
            for index in range(start, shares.parts):
                requested.append(shares.batch(epoch, index))
                yield BatchRequest(epoch, requested[-1].indices)

        # Persistent workers read one plan after the other: a pass that was overtaken would get the new one's batches.
        self._passes = this_pass = self._passes + 1
        self._requests.plan = requests()
        # Workers start here, and read ahead: their requests have to be there before.
        with self._explaining(epoch, start):
            fetched = start_workers(self._data_loader(None, epoch))  # takes the plan
        for index in range(start, shares.parts):
            if self._workers is not None and this_pass != self._passes:
                raise PhotinusError(
                    "another pass over this loader began before this one ended: persistent workers serve one pass at a "
                    "time. Make two loaders, or use persistent_workers=False."
                )
            with self._explaining(epoch, index):
                data = next(fetched)
            yield self._batch(data, requested.popleft(), index, is_pinned=self._num_workers > 0)

    def _streams(self, shares: StreamShares, epoch: int, start: int, look_ahead: int) -> Iterator[Batch]:
        """Yield the batches of a stream, of which some are read ahead.

        With logical shards, a step's batches of this rank's first shard come first, then those of its next one. `start`
        counts all of them.
        """
        if shares.world_size > 1 and self._thread != threading.get_ident():
            advice = "take its batches there, and use num_workers to read ahead"
            raise PhotinusError(f"ranks agree on a stream's end in the thread that made its loader: {advice}")
        parts, of_a_step = (shares.parts, shares.accumulate) if isinstance(shares, StreamShards) else ([shares], 1)
        step, begin = divmod(start, len(parts) * of_a_step)
        first = step * of_a_step
        states = self._places.get((epoch, first), {})
        before = {n: states.get(n, state) for part in parts for n, state in part.begin(first).items()}
        readers = [self._pieces(part, epoch, first, before) for part in parts]
        fillers: list[Any] = [None] * len(readers)
        queue, has_ended, was_idle = deque[tuple[list[Piece], int]](), False, 0
        while True:
            while not has_ended and len(queue) <= look_ahead:
                with agreeing(shares, f"batch {first + len(queue)} of the stream") as counts:
                    pieces = [next(reader) for reader in readers]
                    counts[:] = sum(each.samples for each in pieces), sum(not each.samples for each in pieces)
                if pieces[0].first:
                    self._compare_streams(shares, pieces)
                total, idle = counts
                has_ended = not total or (shares.drop_last and total < shares.batch_size)
                if idle > was_idle and not has_ended:
                    was_idle = idle
                    with agreeing(shares, "the stream's first samples again"):
                        for place, piece in enumerate(pieces):
                            if not piece.samples and fillers[place] is None:
                                fillers[place] = self._moved(self._filler(parts[place], epoch))
                queue += [] if has_ended else [(pieces, total)]
            if not queue and not first:
                short = " full batch" if shares.drop_last else " sample"
                raise PhotinusError(f"{type(self.dataset).__name__} gave not one{short} in epoch {epoch}: is it empty?")
            if not queue:
                return
            end = first + len(queue)
            of_step = [queue.popleft() for _ in range(min(of_a_step, len(queue)))]
            after = {number: state for piece in of_step[-1][0] for number, state in piece.states.items()}
            self._places = {(epoch, first): before, (epoch, first + len(of_step)): after}
            before = after
            bodies = [(place, micro) for place in range(len(readers)) for micro in range(len(of_step))]
            for place, micro in bodies[begin:]:
                pieces, total = of_step[micro]
                piece = pieces[place]
                data = self._moved(piece.data) if piece.samples else fillers[place]
                weight, index = piece.samples * shares.world_size / total, first + micro
                yield Batch(data, weight, piece.samples, total, index, to_come=end - index - 1)
            first, begin = first + len(of_step), 0

    def _pieces(
        self, shares: StreamShares, epoch: int, start: int, states: Mapping[int, State], *, is_filler: bool = False
    ) -> Iterator[Piece]:
        """Yield this rank's part of each batch, from its workers if there are any."""
        workers = 0 if is_filler else min(self._num_workers, len(shares.own_shards))
        reader = ShardReader(shares, epoch, start, workers, states, self._fetch.collate, is_filler)
        read: Iterator[Piece] = iter(reader)
        with self._explaining(epoch, start):
            if workers:
                read = start_workers(self._data_loader(reader, epoch))
        merged = reader.merged(read)
        for index in itertools.count(start):
            with self._explaining(epoch, index):
                piece = next(merged)
            yield piece

    def _filler(self, shares: StreamShares, epoch: int) -> Any:
        """Return the first samples of the epoch, which a rank without further samples repeats with a weight of 0."""
        # They are read again, so that a run that is resumed has the same.
        piece = next(self._pieces(shares, epoch, 0, shares.begin(0), is_filler=True))
        if not piece.samples:
            which = f"of its shards {[number for number, _, _ in shares.own_shards]} of {shares.shards}"
            raise PhotinusError(
                f"rank {shares.rank} has no sample {which} in epoch {epoch}: use fewer shards=, or ranks"
            )
        return piece.data

    def _explaining(self, epoch: int, index: int) -> AbstractContextManager[None]:
        return explaining(self._num_workers, self._timeout_s, f"rank {self.shares.rank}, epoch {epoch}, batch {index}")

    def _data_loader(self, reader: ShardReader | None, epoch: int) -> DataLoader[Any]:
        """Return torch's DataLoader over the requests of a pass, or over a reader of the stream."""
        if self._workers is not None:
            data_loader = self._workers
        elif reader is None:
            # torch's own pinning fails for tensors that lie on a GPU; in this process ours does it.
            pins = self._pins and self._num_workers > 0
            options = (self._num_workers, self._timeout_s, self.of_workers)
            data_loader = make_data_loader(self._fetch, self._requests, *options, pin_memory=pins)
            if self._num_workers and self.of_workers.get("persistent_workers"):
                self._workers = data_loader
        else:
            options = (reader.workers, self._timeout_s, {**self.of_workers, "persistent_workers": False})
            data_loader = make_data_loader(reader, None, *options)
        # What torch.initial_seed() gives in a worker_init_fn: another in each epoch and rank.
        data_loader.generator.manual_seed(rng.derive_seed(self.seed, "workers", epoch, self.shares.rank))
        return data_loader


def train_batches(
    train_set: Dataset[Any] | DataLoader[Any] | Loader,
    batch_size: int | None,
    place: tuple[int, int],
    device: torch.device,
) -> Loader:
    """Return the loader of a training: a new one over a data set, or the user's, checked; on the rank's device."""
    if not isinstance(train_set, Loader):
        return make_loader(train_set, batch_size=batch_size, device=device, place=place)
    # Parts of a validation set differ in their number of batches: ranks would wait for each other for ever.
    shares = train_set.shares
    if isinstance(shares, ShardedOnce):
        raise ValueError("train_set is a photinus.loader(..., train=False): leave train=False out")
    if batch_size not in (None, train_set.batch_size):
        raise ValueError(f"batch_size={batch_size}, but train_set is a loader with batch_size={train_set.batch_size}")
    if (shares.rank, shares.world_size) != place:
        found = f"rank {shares.rank} of {shares.world_size}, but this is rank {place[0]} of {place[1]}"
        raise ValueError(f"train_set is a photinus.loader of {found}: make it after photinus.init(), without place=...")
    # A loader does not know the session's device where it was made before, or by hand.
    if train_set.device is None:
        train_set.device = device
    return train_set


def note_place(text: str) -> None:
    """Set what peers that wait for this rank read if it ends: how far its loop was. "" removes it."""
    # Only backend photinus can pass it on; under others there is nothing to do.
    set_reason = getattr(dist.group.WORLD, "set_reason", None) if dist.is_initialized() else None
    if set_reason is not None:
        set_reason(text)


class _Requests:
    """The sampler that a DataLoader reads: the requests of the present pass."""

    plan: Iterator[BatchRequest]

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.plan


def pin_memory(data: Any) -> Any:
    """`data` with its CPU tensors in page-locked memory, from which a GPU copies without blocking Python."""
    return map_tensors(data, lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)
