"""The forwards of a model over a data set, by all ranks together, each block once and as in one process.

The data set is cut into blocks of `batch_size` samples, and block b is computed by rank b mod world size. The blocks
are those of a single process, so each sample's outputs have the same bits on whichever rank. In each round every rank
has a block, but for the last round.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

from ..errors import CollectiveError
from ..parallel import strategy_of
from ..parallel.exchange.agreement import JSON, check_alike
from ..parallel.exchange.broadcast import broadcast_tensors
from ..parallel.exchange.collectives import resolve_group
from .checkpoint.states import unwrap
from .data import rng
from .data.arguments import whole_number
from .data.loader import Batch, Loader, make_loader
from .data.sampler import ShardedOnce
from .optimizer_modes import evaluating_weights
from .session.session import Session
from .session.wrapping import exchanges_gradients

Data = Dataset[Any] | DataLoader[Any] | Loader
T = TypeVar("T")


class Forwards:
    """The blocks of a data set, and this rank's share of them.

    Attributes:
        samples: of the data set; batch_size: of a block.
        error: this rank's first error; it computes no more then, and takes part in the rounds that are left. One inside
            of a forward that exchanges parameters is raised by `rounds`.

    Raises:
        ValueError, TypeError: the data set is empty or has no length, or the model is not a module.
    """

    def __init__(self, what: str, session: Session, model: nn.Module, dataset: Data, batch_size: int | None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, but {what} needs a torch.nn.Module")
        self._session, self._model = session, model
        for prepare in session.before_evaluation:
            prepare()
        if callable(catch_up := getattr(model, "catch_up", None)):  # a photinus.Average
            catch_up()
        size = _default_size(dataset, session) if batch_size is None else batch_size
        self.batch_size, device = whole_number("batch_size", size, least=1), session.device
        self._batches = make_loader(
            dataset, batch_size=self.batch_size, train=False, seed=0, device=device, place=(0, 1)
        )
        self.samples = self._batches.samples
        if self.samples == 0:
            raise ValueError(f"the data set ({type(self._batches.dataset).__name__}) to {what} on is empty")
        self.error: Exception | None = None

    def compare(self, alike: Mapping[str, JSON], complaint: str, what: str) -> None:
        """Raise ValueError on all ranks if they were given different things: arguments, a data set."""
        check_alike({"batch_size": self.batch_size, "samples": self.samples, **alike}, complaint)
        self._batches.compare_samples(what)

    def rounds(
        self, forward: Callable[[nn.Module, Any], Any], use: Callable[[Any, Batch], T]
    ) -> Generator[T | None, None, None]:
        """Yield `use(forward(model, batch.data), batch)` of this rank's block, in each round; None without a block.

        The model is unwrapped, in eval mode and without gradients.
        """
        size, ranks, model = self.batch_size, self._session.world_size, unwrap(self._model)
        _take_buffers_of_main(self._model, self._session)
        splits = strategy_of(self._model).forward_exchanges
        mine = batches_of(self._batches, blocks_of(self._session.rank, ranks, self.samples, size))
        starts = range(self._session.rank * size, self.samples + self._session.rank * size, ranks * size)
        begun = ended = -1  # of the last forward

        def compute(start: int) -> T | None:
            nonlocal begun, ended
            if start >= self.samples:
                return None
            batch = next(mine)
            begun = start
            with self._numbers_of(start):
                outputs = forward(model, batch.data)
            ended = start
            return use(outputs, batch)

        with evaluating(model), evaluating_weights(self._session.switching, model):
            for start in starts:
                value = self.attempt(partial(compute, start))
                if splits and begun != ended:  # the others wait in this forward: no exchange can reach them
                    assert self.error is not None
                    raise self.error
                # It takes part in the other ranks' forward by one of its own, whose values do not count.
                if splits and ended != start:
                    for batch in batches_of(self._batches, list(range(min(size, self.samples)))):
                        forward(model, batch.data)
                yield value

    @contextmanager
    def _numbers_of(self, start: int) -> Iterator[None]:
        """With logical shards, a block draws numbers of its own, whichever rank computes it."""
        if not self._session.logical_shards:
            yield
            return
        with rng.keep_generators():
            rng.seed_all_streams(rng.derive_seed(self._session.seed or 0, "block", start))
            yield

    def share(self, value: T | None, take: Callable[[T], object], *, everywhere: bool = False) -> None:
        """Call `take` for what the ranks have in this round, in the order of the blocks: on rank 0, or everywhere."""
        values: list[Any] = [value]
        if self._session.world_size > 1:
            # What cannot be pickled is an error of this rank, as all others are: it must not leave the exchange.
            packed = self.attempt(partial(pickle.dumps, value))
            values = [None] * self._session.world_size
            if everywhere:
                dist.all_gather_object(values, packed)
            else:
                dist.gather_object(packed, values if self._session.is_main else None)
            values = [self.attempt(partial(pickle.loads, each)) for each in values if each is not None]
        for each in values:
            if each is not None:
                self.attempt(partial(take, each))

    def attempt(self, call: Callable[[], T]) -> T | None:
        """Return what `call` returns; None after an error, which is kept: the other ranks are not left alone."""
        if self.error is None:
            try:
                return call()
            except CollectiveError:  # the other ranks know already
                raise
            except Exception as error:  # noqa: BLE001 - raised after the last round, as on all ranks
                self.error = error
        return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A block in which a model is in eval mode, without gradients; then each module gets its mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def blocks_of(rank: int, world_size: int, total: int, block: int) -> list[int]:
    """Return the samples of a rank: every world_size-th block, in order; only the last may be short."""
    starts = range(rank * block, total, world_size * block)
    return [index for start in starts for index in range(start, min(start + block, total))]


def batches_of(batches: Loader, samples: list[int]) -> Iterator[Batch]:
    """Return the batches of some samples of the data set."""
    if not samples:
        return iter(())
    batches.shares = ShardedOnce(len(samples), batches.batch_size)
    # Under their own numbers: what is drawn while one is loaded depends on the sample, not on the rank that loads it.
    batches.shares.indices = samples
    return batches.epoch(0)


def _default_size(dataset: Data, session: Session) -> int:
    if isinstance(dataset, Loader):
        return -(-dataset.batch_size // (session.logical_shards or dataset.shares.world_size))
    # A DistributedSampler does not change it: it is that of one forward.
    return (isinstance(dataset, DataLoader) and dataset.batch_size) or 64


def _take_buffers_of_main(model: nn.Module, session: Session) -> None:
    """Give every rank rank 0's buffers (BatchNorm's running statistics), so that all compute with one model.

    Without SyncBatchNorm they differ between the ranks. DDP does the same before each forward that trains, so this
    changes nothing for training; a model that asked DDP not to (broadcast_buffers=False) keeps its own, as do the
    buffers that DDP ignores.
    """
    exchanges = exchanges_gradients(model) or isinstance(model, AveragedModel)
    if session.world_size == 1 or not exchanges or not getattr(model, "broadcast_buffers", True):
        return
    ignored: Collection[str] = getattr(model, "parameters_to_ignore", ())
    buffers = [buffer for name, buffer in unwrap(model).named_buffers() if name not in ignored]
    broadcast_tensors(buffers, resolve_group(None), session.device)
