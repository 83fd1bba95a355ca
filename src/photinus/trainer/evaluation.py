"""Validation on all ranks, every sample exactly once, and the same value at every world size.

Each sample's value has the same bits on every rank (see forwards.py). Every rank adds its values exactly (Shewchuk's
algorithm, Python's `math.fsum`) and sends the sum as two float64 numbers, whose sum over the ranks is again exact: the
mean does not depend on how the samples were spread. The values are exchanged once, at the end.

| world size W, n samples, block B | per rank |
|---|---|
| forwards | ceil(ceil(n / B) / W) at most |
| exchanged | 4 * metrics float64 values gathered, once (before: what is evaluated, compared; the model's buffers) |
| for metrics that are objects | outputs and targets of each block, to rank 0 |

Source: J. R. Shewchuk, Adaptive Precision Floating-Point Arithmetic and Fast Robust Geometric Predicates,
Discrete & Computational Geometry 18 (1997).
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Protocol, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..parallel.exchange.agreement import gather_per_rank, together
from ..parallel.exchange.tensors import move_tensors
from ..waiting_time import waiting_time
from .data.arguments import explains_unknown
from .data.loader import Batch
from .forwards import Data, Forwards
from .objective import Objective, pair_of, sum_and_weight
from .session.session import require_session

_CPU = torch.device("cpu")
_DISTRIBUTED = "distributed_available_fn"  # torchmetrics' own


class MetricObject(Protocol):
    """A metric that sees the whole data set, such as those of torchmetrics."""

    def update(self, outputs: Any, targets: Any, /) -> Any:
        """Take the next batch."""

    def compute(self) -> Any:
        """Return the value."""

    def reset(self) -> Any:
        """Forget what it took."""


# outputs [n, ...], targets [n, ...] -> values [n], or (sum, weight)
Metric = Callable[[Tensor, Tensor], Any] | MetricObject
Forward = Callable[[nn.Module, Any], "tuple[Tensor, Tensor]"]


@overload
def evaluate(
    model: nn.Module, dataset: Data, metric: Metric, *, batch_size: int | None = ..., forward: Forward | None = ...
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
            batch. Or an object with update(outputs, targets), compute() and reset(), as torchmetrics' are: rank 0
            updates it with each batch in the order of the data set, so it computes what one process would. Or a dict
            of them.
        batch_size: samples of one forward on one rank. Default: the DataLoader's (of a `photinus.loader`: its part on
            one rank), else 64.
        forward: function forward(model, batch) that returns (outputs, targets). Default: a batch is (inputs, targets).

    Returns:
        The mean over all samples as a float; for a dict of metrics, a dict of means. Of (sum, weight) it is the sum of
        all sums by the sum of all weights, nan if that is 0. Of an object it is what compute() returns, as a float if
        that is one number; equal on all ranks.

    Raises:
        ValueError: the data set is empty; a metric does not return one value per sample; or the names of the metrics,
            the batch size or the data differ between ranks.
        TypeError: the data set has no length, the model is not a module, or a metric is not a function.
        PhotinusError: another rank failed; the message names it.
    """
    session = require_session("photinus.evaluate")
    metrics: dict[str, Any] = dict(metric) if isinstance(metric, Mapping) else {"metric": metric}
    started, waited_ns = time.perf_counter(), waiting_time.total_ns
    with together("preparing to evaluate"):
        if not metrics:
            raise ValueError("evaluate was given no metric")
        check_functions({f"metric {name!r}": function for name, function in metrics.items()})
        forwards = Forwards("evaluate", session, model, dataset, batch_size)
    names = sorted(metrics, key=str)  # whatever order this rank's dict has
    objects = {name: metrics[name] for name in names if is_metric_object(metrics[name])}
    alike: dict[str, Any] = {"metrics": [*map(str, names)], "objects": [*map(str, objects)]}
    forwards.compare(alike, "the ranks were given different things to evaluate", "data to evaluate")
    sums = {name: _Sums(name, metrics[name]) for name in names if name not in objects}

    def add(pair: Any, batch: Batch) -> Any:
        outputs, targets = pair
        for each in sums.values():
            each.add(outputs, targets, batch.samples)
        return move_tensors((outputs, targets), _CPU, blocking=True) if objects else None

    def update(pair: Any) -> None:
        outputs, targets = move_tensors(pair, session.device)
        for each in objects.values():
            each.update(outputs, targets)

    for each in objects.values() if session.is_main else ():
        forwards.attempt(partial(_begin, each, session.device))
    with closing(forwards.rounds(forward or _forward_pair, add)) as rounds:
        for pair in rounds:
            if objects:
                forwards.share(pair, update)
    # torchmetrics would add up what all ranks have, and rank 0 has seen all.
    with alone(objects.values()):
        computed = {name: forwards.attempt(each.compute) for name, each in objects.items() if session.is_main}
    values = {name: _plain(value) for name, value in computed.items()}
    packed = forwards.attempt(partial(pickle.dumps, values)) if session.world_size > 1 else None
    with together("evaluate"):
        if forwards.error is not None:
            raise forwards.error
        parts = [part for each in sums.values() for part in each.parts()]
    found: dict[str, Any] = dict(zip(sums, _means(parts), strict=True))
    if objects:
        found |= values if packed is None else _from_main(packed)
    session.aside_s += time.perf_counter() - started
    waiting_time.total_ns = waited_ns  # no part of a training step
    return {name: found[name] for name in metrics} if isinstance(metric, Mapping) else found["metric"]


def is_metric_object(metric: object) -> bool:
    """Return whether a metric is an object with update, compute and reset, as torchmetrics' are."""
    names = ("update", "compute", "reset")
    return not isinstance(metric, type) and all(callable(getattr(metric, name, None)) for name in names)


def check_functions(functions: Mapping[str, Any]) -> None:
    """Refuses what would fail where it is first called, at the end of an epoch perhaps."""
    for name, function in functions.items():
        if isinstance(function, type):
            raise TypeError(f"{name} is the class {function.__name__}; give an object of it: {function.__name__}()")
        if not callable(function) and not is_metric_object(function):
            raise TypeError(
                f"{name} is a {type(function).__name__}, but a function (outputs, targets) is needed, or an object "
                f"with update, compute and reset"
            )


class _Sums:
    """A metric's values of this rank's samples, and their weights."""

    def __init__(self, name: str, function: Any) -> None:
        self._name, self._function = name, function
        self._values: list[Tensor] = []
        self._weights: list[Any] = []

    def add(self, outputs: Any, targets: Any, samples: int) -> None:
        """Add a batch."""
        is_loss = isinstance(self._function, Objective)
        value = self._function.sums(outputs, targets, samples) if is_loss else self._function(outputs, targets)
        weight: Any = samples
        if is_sum := isinstance(value, tuple):
            value, weight = sum_and_weight(f"metric {self._name!r}", value)
        values = value.reshape(1) if is_sum else torch.as_tensor(value)
        if not is_sum and values.shape != (samples,):
            raise ValueError(
                f"metric {self._name!r} gave shape {list(values.shape)} for {samples} samples, but [{samples}] is "
                f"needed: one value per sample, so that the mean over all samples is exact (for a loss: "
                f'reduction="none")'
            )
        if values.is_complex():
            raise ValueError(f"metric {self._name!r} gave {values.dtype} values, but real numbers are needed")
        self._values.append(values.detach().double())
        self._weights.append(weight)

    def parts(self) -> list[float]:
        """Return the sums of the values and of the weights, each in two numbers."""
        values = torch.cat(self._values).cpu().tolist() if self._values else []
        return [*_exact_sum(values), *_exact_sum([float(each) for each in self._weights])]


def _begin(metric: Any, device: torch.device) -> None:
    metric.reset()
    if isinstance(metric, nn.Module):
        metric.to(device)


@contextmanager
def alone(metrics: Iterable[Any]) -> Iterator[None]:
    """Let torchmetrics' objects compute without the other ranks, which they would wait for."""
    inner = [each for metric in metrics if isinstance(metric, nn.Module) for each in metric.modules()]
    found = [(each, vars(each)[_DISTRIBUTED]) for each in inner if _DISTRIBUTED in vars(each)]
    for each, _ in found:
        setattr(each, _DISTRIBUTED, lambda: False)
    try:
        yield
    finally:
        for each, value in found:
            setattr(each, _DISTRIBUTED, value)


def _from_main(packed: bytes) -> dict[str, Any]:
    """Return rank 0's values on all ranks, from its pickle. All ranks raise if one cannot unpickle them."""
    shared = [packed]
    dist.broadcast_object_list(shared, 0)
    with together("evaluate"):
        values: dict[str, Any] = pickle.loads(shared[0])
    return values


def _plain(value: Any) -> Any:
    """Return a number for a tensor of one; other tensors on the CPU."""
    value = move_tensors(value, _CPU, blocking=True)
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex() else value


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


def _means(mine: list[float]) -> list[float]:
    """The means of the ranks' sums and weights, each in two parts."""
    gathered = gather_per_rank(mine)
    sums = [_sum(each[i + j] for each in gathered for j in (0, 1)) for i in range(0, len(mine), 2)]
    return [total / weight if weight else math.nan for total, weight in zip(sums[::2], sums[1::2], strict=True)]
