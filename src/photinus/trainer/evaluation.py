"""Validation on all ranks, every sample exactly once, and the same value at every world size.

The data set is cut into blocks of `batch_size` samples, and block b is computed by rank b mod world size. The blocks
are those of a single process, so each sample's value has the same bits whoever computes it. Every rank adds its
values exactly (Shewchuk's algorithm, Python's `math.fsum`) and hands on the sum as two float64 numbers, whose sum
over the ranks is again exact: the mean does not depend on how the samples were spread. What all ranks must have
alike is compared first; the values are exchanged once, at the end, so ranks may have different numbers of blocks.

| world size W, n samples, block B | per rank |
|---|---|
| forwards | ceil(ceil(n / B) / W) at most |
| exchanged | 4 * metrics float64 values gathered, once (before: what is evaluated, compared; the model's buffers) |

Source: J. R. Shewchuk, Adaptive Precision Floating-Point Arithmetic and Fast Robust Geometric Predicates,
Discrete & Computational Geometry 18 (1997).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..errors import CollectiveError, PhotinusError
from ..parallel import strategy_of
from ..parallel.exchange.agreement import check_alike, gather_per_rank, together
from ..parallel.exchange.broadcast import broadcast_tensors
from ..parallel.exchange.collectives import resolve_group
from ..training_process import waiting_time
from .checkpoint.states import unwrap
from .data.arguments import explains_unknown, whole_number
from .data.loader import Batch, Loader, loader
from .data.sampler import ShardedOnce
from .objective import Objective, sum_and_weight
from .session.session import Session, require_session
from .session.wrapping import exchanges_gradients

Data = Dataset[Any] | DataLoader[Any] | Loader
Metric = Callable[[Tensor, Tensor], Any]  # outputs [n, ...], targets [n, ...] -> values [n], or (sum, weight)
Forward = Callable[[nn.Module, Any], "tuple[Tensor, Tensor]"]


@overload
def evaluate(
    model: nn.Module,
    dataset: Data,
    metric: Metric,
    *,
    batch_size: int | None = ...,
    forward: Forward | None = ...,
) -> float: ...


@overload
def evaluate(
    model: nn.Module,
    dataset: Data,
    metric: Mapping[str, Metric],
    *,
    batch_size: int | None = ...,
    forward: Forward | None = ...,
) -> dict[str, float]: ...


@explains_unknown
def evaluate(
    model: nn.Module,
    dataset: Data,
    metric: Metric | Mapping[str, Metric],
    *,
    batch_size: int | None = None,
    forward: Forward | None = None,
) -> float | dict[str, float]:
    """Return the mean of a metric over a data set, computed by all ranks together. Every rank must call it.

    During the call the model is unwrapped, in eval mode and without gradients. Then each module gets its mode back.

    Args:
        model: wrapped or plain model.
        dataset: map-style data set of pairs (input, target), or of anything else if `forward` is given. Or torch's
            DataLoader, or a `photinus.loader`, whose collate_fn and workers are used.
        metric: function metric(outputs, targets) that returns one value per sample, shape [n], or (sum, weight) of the
            batch; or a dict of them.
        batch_size: samples of one forward on one rank. Default: the DataLoader's (of a `photinus.loader`: its part on
            one rank), else 64.
        forward: function forward(model, batch) that returns (outputs, targets). Default: a batch is (inputs, targets).

    Returns:
        The mean over all samples as a float; for a dict of metrics, a dict of means. Of (sum, weight) it is the sum of
        all sums by the sum of all weights, nan if that is 0.

    Raises:
        ValueError: the data set is empty; a metric does not return one value per sample; or the names of the metrics,
            the batch size or the number of samples differ between ranks.
        TypeError: the data set has no length, the model is not a module, or a metric is not a function.
        PhotinusError: another rank failed; the message names it.
    """
    session = require_session("photinus.evaluate")
    metrics: dict[str, Any] = dict(metric) if isinstance(metric, Mapping) else {"metric": metric}
    started, waited_ns = time.perf_counter(), waiting_time.total_ns
    with together("preparing to evaluate"):
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, but evaluate needs a torch.nn.Module")
        if not metrics:
            raise ValueError("evaluate was given no metric")
        check_functions({f"metric {name!r}": function for name, function in metrics.items()})
        size = whole_number("batch_size", _default_size(dataset) if batch_size is None else batch_size, least=1)
        batches = loader(dataset, batch_size=size, train=False, seed=0, device=session.device, place=(0, 1))
        total = batches.samples
        if total == 0:
            raise ValueError(f"the data set ({type(batches.dataset).__name__}) to evaluate on is empty")
    names = sorted(metrics, key=str)  # whatever order this rank's dict has
    alike: dict[str, Any] = {"metrics": [*map(str, names)], "batch_size": size, "samples": total}
    check_alike(alike, "the ranks were given different things to evaluate")
    _take_buffers_of_main(model, session)
    error: Exception | None = None
    parts: list[float] = []
    try:
        values = _values_of_this_rank(
            unwrap(model),
            batches,
            metrics,
            _blocks_of(session.rank, session.world_size, total, size),
            _idle_block(model, session, total, size),
            forward or _forward_pair,
        )
        parts = [part for name in names for each in values[name] for part in _exact_sum(each)]
    except CollectiveError:  # in a forward that exchanges: the other ranks know already, and do not wait to be told
        raise
    except Exception as caught:  # noqa: BLE001 - raised below, after the other ranks have been told
        error = caught
    means = dict(zip(names, _means(parts, session, error), strict=True))
    session.aside_s += time.perf_counter() - started
    waiting_time.total_ns = waited_ns  # no part of a training step
    return {name: means[name] for name in metrics} if isinstance(metric, Mapping) else means["metric"]


def _default_size(dataset: Data) -> int:
    if isinstance(dataset, Loader):
        return -(-dataset.batch_size // dataset.shares.world_size)
    # A DistributedSampler does not change it: it is that of one forward.
    return (isinstance(dataset, DataLoader) and dataset.batch_size) or 64


def check_functions(functions: Mapping[str, Any]) -> None:
    """Refuses what would fail where it is first called, at the end of an epoch perhaps."""
    for name, function in functions.items():
        if isinstance(function, type):
            raise TypeError(f"{name} is the class {function.__name__}; give an object of it: {function.__name__}()")
        if not callable(function):
            raise TypeError(f"{name} is a {type(function).__name__}, but a function (outputs, targets) is needed")


def _blocks_of(rank: int, world_size: int, total: int, block: int) -> list[int]:
    """The samples of rank `rank`: every world_size-th block, in order; only the last may be short."""
    starts = range(rank * block, total, world_size * block)
    return [index for start in starts for index in range(start, min(start + block, total))]


def _idle_block(model: nn.Module, session: Session, total: int, block: int) -> list[int]:
    """Samples for one more forward, whose values do not count: where each forward exchanges (a model that is split over
    the ranks), the ranks that have a block less than rank 0 take part in its last forward by one of their own."""
    most, own = (len(range(rank * block, total, session.world_size * block)) for rank in (0, session.rank))
    return list(range(min(block, total))) if strategy_of(model).forward_exchanges and own < most else []


def _values_of_this_rank(
    model: nn.Module,
    batches: Loader,
    metrics: Mapping[str, Any],
    mine: list[int],
    idle: list[int],
    forward: Forward,
) -> dict[str, tuple[list[float], list[float]]]:
    """Each metric's value for each of the samples `mine`."""
    found: dict[str, tuple[list[Tensor], list[Any]]] = {name: ([], []) for name in metrics}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            for batch in _batches_of(batches, mine):
                outputs, targets = forward(model, batch.data)
                for name, function in metrics.items():
                    is_loss = isinstance(function, Objective)
                    value = function.sums(outputs, targets, batch.samples) if is_loss else function(outputs, targets)
                    weight: Any = batch.samples
                    if is_sum := isinstance(value, tuple):
                        value, weight = sum_and_weight(f"metric {name!r}", value)
                    values = value.reshape(1) if is_sum else torch.as_tensor(value)
                    if not is_sum and values.shape != (batch.samples,):
                        raise ValueError(
                            f"metric {name!r} gave shape {list(values.shape)} for {batch.samples} samples, but "
                            f"[{batch.samples}] is needed: one value per sample, so that the mean over all samples is "
                            f'exact (for a loss: reduction="none")'
                        )
                    if values.is_complex():
                        raise ValueError(f"metric {name!r} gave {values.dtype} values, but real numbers are needed")
                    found[name][0].append(values.detach().double())
                    found[name][1].append(weight)
            for batch in _batches_of(batches, idle):
                forward(model, batch.data)
    finally:
        for module, training in modes.items():
            module.training = training
    return {
        name: (torch.cat(values).cpu().tolist() if values else [], [float(each) for each in weights])
        for name, (values, weights) in found.items()
    }


def _batches_of(batches: Loader, samples: list[int]) -> Iterator[Batch]:
    if not samples:
        return iter(())
    batches.shares = ShardedOnce(len(samples), batches.batch_size)
    # Under their own numbers: what is drawn while one is loaded depends on the sample, not on the rank that loads it.
    batches.shares.indices = samples
    return batches.epoch(0)


def pair_of(batch: Any, who: str, advice: str) -> tuple[Any, Any]:
    """Refuses a batch whose parts are no inputs and targets: a tensor of two samples would be taken for them."""
    if isinstance(batch, (Tensor, Mapping, str)) or (isinstance(batch, Sequence) and len(batch) != 2):
        parts = f" of {len(batch)} parts" if isinstance(batch, Sequence) else ""
        raise TypeError(f"{who} batches (inputs, targets), but got a {type(batch).__name__}{parts}: {advice}")
    inputs, targets = batch
    return inputs, targets


def _forward_pair(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    advice = "give forward=... that takes (model, batch) and returns (outputs, targets)"
    inputs, targets = pair_of(batch, "evaluate expects", advice)
    return model(inputs), targets


def _exact_sum(values: Sequence[float]) -> tuple[float, float]:
    """The sum of the values as two float64 numbers, the second the rounding error of the first."""
    high = _sum(values)
    return (high, math.fsum([*values, -high])) if math.isfinite(high) else (high, 0.0)


def _sum(values: Iterable[float]) -> float:
    """Exactly rounded; NaN where infinities of both signs meet, or sums leave float64's range."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return math.nan


def _means(mine: list[float], session: Session, error: Exception | None) -> list[float]:
    """The means of the ranks' sums and weights, each in two parts; raises on every rank when one failed."""
    try:
        gathered = gather_per_rank([] if error is not None else mine)
    except CollectiveError as unheard:  # where a forward exchanges, the others may still be waiting in one
        raise unheard if error is None else error from unheard
    if error is not None:
        raise error
    for rank, sums in enumerate(gathered):
        if not sums:
            raise PhotinusError(
                f"evaluate failed on rank {rank} ({session.hosts[rank]}); see the error of that rank. "
                f"This is rank {session.rank}, which had no error."
            )
    sums = [_sum(each[i + j] for each in gathered for j in (0, 1)) for i in range(0, len(mine), 2)]
    return [total / weight if weight else math.nan for total, weight in zip(sums[::2], sums[1::2], strict=True)]


def _take_buffers_of_main(model: nn.Module, session: Session) -> None:
    """Gives every rank rank 0's buffers (BatchNorm's running statistics), so that all evaluate one model.

    Without SyncBatchNorm they differ between the ranks. DDP does the same before each forward that trains, so this
    changes nothing for training; a model that asked DDP not to (broadcast_buffers=False) keeps its own, as do the
    buffers that DDP was told to ignore.
    """
    if session.world_size == 1 or not exchanges_gradients(model) or not getattr(model, "broadcast_buffers", True):
        return
    ignored: Collection[str] = getattr(model, "parameters_to_ignore", ())
    buffers = [buffer for name, buffer in unwrap(model).named_buffers() if name not in ignored]
    broadcast_tensors(buffers, resolve_group(None), session.device)
