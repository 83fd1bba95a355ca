"""Data without a length: which shards of them a rank reads, and reading one from any place on.

A stream is cut into shards, whose number belongs to the run. Shard s gives the s-th part of each global batch, and rank
r takes the r-th of W contiguous parts of it, as of a data set with a length. So the samples of a step are the same on
any number of ranks. What cannot be cut is one shard, which all ranks read.

    4 shards, batch_size=8 | a0 a1 | b0 b1 | c0 c1 | d0 d1 |      step 0; step 1 has a2 a3 b2 b3 c2 c3 d2 d3
    rank 0 of 2            | a0 a1 | b0 b1 |                      reads shards a and b
    rank 2 of 3            |               |    c1 | d0 d1 |      reads shards c and d; rank 1 reads c too

The place in a shard is the number of samples that were taken from it. Every few samples the state of the object that is
read is kept (state_dict, torchdata's protocol). A resume loads the last state and reads the samples after it again;
without a state it reads all samples again. Shuffling takes blocks of N samples, in an order from (seed, epoch, shard,
block), so reading a block again gives the same order.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from ...errors import PhotinusError
from ...parallel.exchange.collectives import control_device
from .arguments import whole_number
from .rng import derive_seed, keep_generators, seed_host_streams, state_of
from .same_data import Description, describe
from .sampler import part_of

_BUFFER = 1000  # samples of a shard, for shuffle=True
_STATE_EVERY = 16  # samples, without shuffling: what a resume reads again at most
_DEPTH = 3  # of attributes of attributes
_LONGEST, _MOST = 100_000, 1000  # entries of a list, and attributes, that are looked at

State = dict[str, Any]  # of a shard: taken, ended, at, source, of


def is_stream(dataset: Any) -> bool:
    """Return whether these are data without a length: an iterable, or a function of (shard, shards)."""
    if isinstance(dataset, type) or (hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)):
        return False
    return hasattr(dataset, "__iter__") or (callable(dataset) and not hasattr(dataset, "__getitem__"))


def splits(dataset: Any) -> bool:
    """Return whether it can be cut into shards."""
    return _is_function(dataset) or callable(getattr(dataset, "shard", None))


def _is_function(dataset: Any) -> bool:
    return callable(dataset) and not hasattr(dataset, "__iter__")


class StreamShares:
    """The shards of a stream that this rank reads, and its samples in them. The arguments are those of `loader`."""

    samples = 0  # not known
    who = "ranks"

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        shards: int | None = None,
        shuffle: bool | int = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.dataset, self.batch_size, self.seed, self.drop_last = dataset, batch_size, seed, drop_last
        self.rank, self.world_size = rank, world_size
        self.buffer = _BUFFER if shuffle is True else 0 if shuffle is False else whole_number("shuffle", shuffle)
        self.shuffle: bool | int = self.buffer or False
        _check(dataset, world_size)
        self.is_given = shards is not None
        self.counts: dict[int, OwnCounts] = {}  # by shard, of the last epoch that this process read
        most = getattr(dataset, "num_shards", None) if splits(dataset) else 1  # datasets has it: the number of files
        self._most = most if isinstance(most, int) else sys.maxsize
        self.cut(min(self.world_size, self._most) if shards is None else shards)

    def cut(self, shards: int) -> None:
        """Cut the stream into this number of shards."""
        self.shards = shards
        if shards > self._most:
            what = f"has {self._most}" if splits(self.dataset) else "cannot be split"
            raise ValueError(
                f"shards={shards}, but {type(self.dataset).__name__} {what}: use at most {self._most} (ranks can share "
                f"a shard), or give a function of (shard, shards)"
            )
        least = max(shards, self.world_size)
        if self.batch_size < least:
            raise ValueError(
                f"batch_size={self.batch_size} is fewer samples than {self.world_size} {self.who} and {shards} shards "
                f"need: each gives one to every batch. Use a batch_size of at least {least}, or fewer shards=."
            )
        first, end = part_of(self.batch_size, self.rank, self.world_size)
        # Of each: its number; its samples in a batch of all ranks; the slice of these that this rank keeps.
        self.own_shards: list[tuple[int, int, slice]] = []
        for shard in range(shards):
            begin, stop = part_of(self.batch_size, shard, shards)
            if begin < end and first < stop:
                own = slice(max(first, begin) - begin, min(end, stop) - begin)
                self.own_shards.append((shard, stop - begin, own))

    def begin(self, step: int) -> dict[int, State]:
        """Return the places of this rank's shards before a step, if only their beginnings are known."""
        begin = {"ended": False, "at": 0, "source": None, "of": None}
        return {number: {**begin, "taken": step * count} for number, count, _ in self.own_shards}

    def __len__(self) -> int:
        raise TypeError(f"{type(self.dataset).__name__} is a stream, whose length is not known")

    def note(self, num_workers: int) -> None:
        """Print a line on rank 0 if the cut costs something."""
        note = None
        whole = "" if splits(self.dataset) else ", for it cannot be split (it has no shard(num_shards, index))"
        if self.shards < self.world_size:
            cost = f"{self.world_size} ranks together read all data {self.world_size / self.shards:.3g} times"
            note = f"{type(self.dataset).__name__} has {self.shards} shard{'s' * (self.shards > 1)}: {cost}{whole}"
        elif num_workers > len(self.own_shards) and not whole:
            cost = f"a rank reads {len(self.own_shards)} of {self.shards} shards, each by one worker"
            note = f"num_workers={num_workers}, but {cost}. For more give shards={self.world_size * num_workers}"
        if note is not None and self.rank == 0:
            print(f"note: {note}", flush=True)


class StreamShards(StreamShares):
    """A stream of which each logical shard reads its samples alone, as the rank of that number would.

    Args:
        shares: of the ranks, with the options.
        own: this rank's logical shards, of `shards` into which each batch is cut.
        accumulate: batches of a step.

    Attributes:
        parts: of each of the own logical shards.
    """

    who = "logical_shards"

    def __init__(self, shares: StreamShares, own: range, shards: int, accumulate: int) -> None:
        self.parts: list[StreamShares] = []
        cut = shares.shards if shares.is_given else None
        options: dict[str, Any] = {"shards": cut, "shuffle": shares.shuffle, "seed": shares.seed}
        options |= {"world_size": shards, "drop_last": shares.drop_last}
        self.accumulate = accumulate
        super().__init__(shares.dataset, shares.batch_size, rank=own[0], **options)
        self.rank = shares.rank  # for messages
        self.parts = [StreamShares(shares.dataset, shares.batch_size, rank=each, **options) for each in own]

    def cut(self, shards: int) -> None:
        """Cut the stream into this number of shards."""
        super().cut(shards)
        for part in self.parts:
            part.cut(shards)


def _check(dataset: Any, world_size: int) -> None:
    """Raise TypeError for an object that can be read only once, or a function of other arguments; ValueError for one
    that `split_dataset_by_node` of Hugging Face has divided.
    """
    if world_size > 1 and getattr(dataset, "_distributed", None) is not None:
        raise ValueError(
            f"this {type(dataset).__name__} is one rank's part of a stream already: Photinus divides the stream among "
            f"the ranks itself, and of a part the other ranks' share would be lost. Leave split_dataset_by_node out"
        )
    if _is_function(dataset):
        try:
            inspect.signature(dataset).bind(0, 1)
        except TypeError as error:
            name = getattr(dataset, "__name__", type(dataset).__name__)
            raise TypeError(f"{name} needs to take (shard, shards) and return an iterable: {error}") from None
    elif isinstance(dataset, Iterator) and not _has_state(dataset):
        what = "can be read only once: give a function of (shard, shards) that makes it"
        raise TypeError(f"a {type(dataset).__name__} {what}")


class Shard:
    """One shard of a stream in one epoch: its samples, from any place on."""

    def __init__(self, shares: StreamShares, number: int, epoch: int, state: State) -> None:
        self._shares, self.number, self.epoch = shares, number, epoch
        self._size, self._every = shares.buffer or 1, shares.buffer or _STATE_EVERY
        self._block: list[Any] = []  # to hand out, last first
        self._ahead: list[Any] = []  # of the next block
        self._place = self._read = self._begun = state["at"]
        self._marks = {state["at"]: (state["source"], state["of"])}  # states of the source, by the samples read before
        self._source_ended = state["ended"]
        if state["ended"]:
            self._place = state["taken"]
            return
        began = time.perf_counter()
        self._open(state)
        while self._place < state["taken"] and self._next():
            pass
        again, seconds = self._read - state["at"], time.perf_counter() - began
        if shares.rank == 0 and number == 0 and again > 2 * _STATE_EVERY:  # the others take as long
            what = f"{again:,} samples of shard 0 of {shares.shards} were read again in {seconds:.1f} s"
            print(f"note: {what}, to come back to sample {self._place:,} of epoch {epoch + 1}", flush=True)

    def take(self, count: int) -> list[Any]:
        """Return the next samples; fewer where it ends."""
        return [sample for _ in range(count) for sample in self._next()]

    def state(self) -> State:
        """Return the place, for another Shard that is to go on here."""
        at = self._place // self._every * self._every
        source, of = self._marks.get(at, (None, None))
        ended = self._source_ended and not self._block and not self._ahead
        return {"taken": self._place, "ended": ended, "at": 0 if source is None else at, "source": source, "of": of}

    def _open(self, state: State) -> None:
        dataset, shards = self._shares.dataset, self._shares.shards
        if self.number in self._shares.counts:
            self._shares.counts.pop(self.number).put_back()
        self._seed("open")
        if _is_function(dataset):
            getattr(dataset, "set_epoch", id)(self.epoch)  # `id` does nothing to it
            source = dataset(self.number, shards)
        elif splits(dataset):
            source = dataset.shard(num_shards=shards, index=self.number)
        else:
            source = copy.copy(dataset)  # it may count in itself
        getattr(source, "set_epoch", id)(self.epoch)
        # The iterator's own state comes first, as torchdata has it; which of them it is, the saved state says.
        if state["of"] == "source":
            source.load_state_dict(copy.deepcopy(state["source"]))
        self._source = source
        if not (_is_function(dataset) or type(source).__module__.startswith("datasets.")):
            self._shares.counts[self.number] = OwnCounts(source)
        try:
            self._iterator: Any = iter(source)
        except TypeError as error:
            raise TypeError(f"shard {self.number} of {shards} is a {type(source).__name__}: {error}") from None
        if state["of"] == "iterator":
            self._iterator.load_state_dict(copy.deepcopy(state["source"]))
        holders = {"iterator": self._iterator, "source": source}
        self._holder = [pair for pair in holders.items() if _has_state(pair[1]) and not _loses_samples(pair[1])][:1]

    def _next(self) -> list[Any]:
        """Return the next sample in a list, empty at the end. A full block reads one for each that it hands out."""
        if not self._block:
            self._fill(self._size)
            self._block, self._ahead = self._shuffled(self._ahead), []
        if not self._block:
            return []
        self._place += 1
        sample = self._block.pop()
        # Also where nothing is shuffled: that it has ended is known with its last sample.
        self._fill(len(self._ahead) + 1)
        return [sample]

    def _shuffled(self, samples: list[Any]) -> list[Any]:
        if self._size == 1:
            return samples
        seed = derive_seed(self._shares.seed, "stream order", self.epoch, self.number, self._place // self._size)
        generator = torch.Generator(device="cpu").manual_seed(seed)
        return [samples[place] for place in torch.randperm(len(samples), generator=generator, device="cpu").tolist()]

    def _fill(self, count: int) -> None:
        while len(self._ahead) < count and not self._source_ended:
            # Not at the beginning: before its first sample an object may not know its place.
            if self._read % self._every == 0 and self._read > self._begun:
                self._marks = {read: mark for read, mark in self._marks.items() if read >= self._read - self._every}
                for of, holder in self._holder:
                    self._marks[self._read] = copy.deepcopy(holder.state_dict()), of
            self._seed(self._read)
            try:
                self._ahead.append(next(self._iterator))
                self._read += 1
                if self._read <= self._begun + 2 and self.number in self._shares.counts:
                    self._look_at(self._shares.counts[self.number])
            except StopIteration:
                self._source_ended = True
            except Exception as error:
                if hasattr(error, "add_note"):
                    where = f"sample {self._read} of shard {self.number} of {self._shares.shards}"
                    error.add_note(f"photinus: while reading {where} in epoch {self.epoch}")
                raise

    def _look_at(self, counts: OwnCounts) -> None:
        if self._read == self._begun + 1:
            counts.first_sample_came()
            return
        names = counts.second_sample_came()
        # In the run's first epoch, so once. Who has set_epoch knows the epoch.
        if names and self._shares.rank == self.number == self.epoch == 0 and not hasattr(self._source, "set_epoch"):
            kind = type(self._source).__name__
            print(
                f"warning: reading {kind} changes its {', '.join(names)}. Each epoch begins with it as it was given, "
                f"on all ranks and after a resume: a count of epochs or a generator gives each epoch the same order. "
                f"Give {kind} a method set_epoch(epoch): it is called with 0, 1, ... before each epoch",
                flush=True,
            )

    def _seed(self, sample: int | str) -> None:
        seed_host_streams(derive_seed(self._shares.seed, "stream", self.epoch, self.number, sample))


def _has_state(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _loses_samples(value: Any) -> bool:
    """Return whether it is one of datasets' with a shuffle buffer, whose content is not in its state."""
    inside = [getattr(value, "_ex_iterable", None), getattr(value, "ex_iterable", None)]
    inside += getattr(value, "ex_iterables", [])
    is_one = type(value).__name__ == "BufferShuffledExamplesIterable"
    return is_one or any(_loses_samples(each) for each in inside if each is not None)


class _Entry(NamedTuple):
    name: str  # of the attribute
    value: Any
    get: Callable[[], Any]
    put_back: Callable[[Any], object]
    is_number: bool


class OwnCounts:
    """Counts that an object without a length keeps itself while it is read: of its epochs, or by its generators.

    A shard begins each epoch with the object as it was given, wherever the run resumes. So what reading changed is put
    back, and a line says which attributes these are: with a count of its own, the order is the same in every epoch.

    It looks at the numbers, lists and random generators in the object's attributes, and in those of its attributes.
    """

    def __init__(self, value: Any) -> None:
        self._entries = [*_entries(value, "", _DEPTH, set())]
        self._changed: list[_Entry] = []
        self._numbers: list[Any] = []

    def first_sample_came(self) -> None:
        """Note what the first sample of an epoch changed."""
        self._changed = [each for each in self._entries if not _equal(each.get(), each.value)]
        self._numbers = [each.get() for each in self._changed]

    def second_sample_came(self) -> list[str]:
        """Return the attributes that count epochs or draw: a number that each sample changes counts samples."""
        pairs = zip(self._changed, self._numbers, strict=True)
        return [each.name for each, first in pairs if not each.is_number or _equal(each.get(), first)]

    def put_back(self) -> None:
        """Give all that the first sample changed the value that it had before."""
        for each in self._changed:
            each.put_back(each.value)


def _entries(value: Any, name: str, depth: int, seen: set[int]) -> Iterator[_Entry]:
    """Return what may count. Nothing is copied but lists, and states of generators."""
    if id(value) in seen:
        return
    seen.add(id(value))
    state = state_of(value)
    if state is not None:
        get, put_back = state
        yield _Entry(name, get(), get, put_back, False)
    elif type(value) is list and len(value) <= _LONGEST:
        yield _Entry(name, [*value], partial(list, value), partial(value.__setitem__, slice(None)), False)
    elif depth and not isinstance(value, (type, torch.nn.Module)):
        attributes: Any = value if type(value) is dict else getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or len(attributes) > _MOST:
            return
        for key, item in [*attributes.items()]:
            inner = f"{name}.{key}" if name else str(key)
            if type(item) in (int, float):
                yield _Entry(inner, item, partial(attributes.get, key), partial(attributes.__setitem__, key), True)
            else:
                yield from _entries(item, inner, depth - 1, seen)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, list) and isinstance(second, list):  # of any objects: the same ones in the same order
        return [*map(id, first)] == [*map(id, second)]
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return repr(first) == repr(second)  # of numpy's states: with arrays inside


class Piece(NamedTuple):
    """A reader's samples of this rank's part of a batch: none, after its shards' end."""

    samples: int
    data: Any  # collated; or, where several workers read, the pickled samples
    states: dict[int, State]  # of the shards, after these samples
    first: dict[int, Description]  # by shard, of its first sample; only the first piece of a pass has them


@dataclass
class ShardReader(IterableDataset[Piece]):
    """Reads this rank's shards of an epoch, step by step, without an end; each worker process reads some of them."""

    shares: StreamShares
    epoch: int
    start: int
    workers: int  # processes; 0 for this one
    states: Mapping[int, State]  # by shard, where to begin
    collate: Callable[[list[Any]], Any]
    is_filler: bool = False  # keep a sample at least

    def __iter__(self) -> Iterator[Piece]:
        info = get_worker_info()
        # The shards are this worker's already: sources that look for workers would divide them again.
        torch.utils.data._utils.worker._worker_info = None
        begin, end = part_of(len(self.shares.own_shards), info.id if info else 0, self.workers or 1)
        shards_of_worker = self.shares.own_shards[begin:end]
        shards: list[Shard] = []
        for step in itertools.count(self.start):
            with nullcontext() if info else keep_generators():
                shards = shards or [Shard(self.shares, n, self.epoch, self.states[n]) for n, _, _ in shards_of_worker]
                samples: list[Any] = []
                first: dict[int, Description] = {}
                for shard, (_, count, own) in zip(shards, shards_of_worker, strict=True):
                    part = shard.take(count)
                    if step == self.start:
                        first[shard.number] = describe(part[:1])
                    samples += part[own] or part[: self.is_filler]
                data = pickle.dumps(samples) if self.workers > 1 else self._collated(samples, step)
            yield Piece(len(samples), data, {each.number: each.state() for each in shards}, first)

    def merged(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yield one piece for each step; torch takes those of the workers in turn."""
        for step in itertools.count(self.start):
            found = [next(pieces) for _ in range(self.workers or 1)]
            if self.workers > 1:
                samples = [sample for piece in found for sample in pickle.loads(piece.data)]
                states = {number: state for piece in found for number, state in piece.states.items()}
                first = {number: one for piece in found for number, one in piece.first.items()}
                with keep_generators():
                    found = [Piece(len(samples), self._collated(samples, step), states, first)]
            yield found[0]

    def _collated(self, samples: list[Any], step: int) -> Any:
        seed_host_streams(derive_seed(self.shares.seed, "stream batch", self.epoch, step, self.shares.rank))
        return self.collate(samples) if samples else None


@contextmanager
def agreeing(shares: StreamShares, doing: str) -> Iterator[list[int]]:
    """A block that succeeds on all ranks or raises on all; after it, its list has the sums over the ranks."""
    counts, error = [0, 1], None
    try:
        yield counts
    except Exception as caught:  # noqa: BLE001 - raised below, once the other ranks know
        error = caught
    *counts[:], failed, failing = sum_over_ranks(shares, [*counts, error is not None, shares.rank * bool(error)])
    if error is not None:
        raise error
    if failed:
        which = f"rank {failing}" if failed == 1 else f"{failed} ranks"
        raise PhotinusError(f"{which} could not read {doing}: see its own error. Rank {shares.rank} had none")


def sum_over_ranks(shares: StreamShares, numbers: list[int]) -> list[int]:
    """The sum of each number over the ranks that share a stream."""
    if shares.world_size == 1:
        return numbers
    sums = torch.tensor(numbers, device=control_device(cast(dist.ProcessGroup, dist.group.WORLD)))
    dist.all_reduce(sums)
    return cast("list[int]", sums.tolist())
