"""The losses of a loop's steps: each rank's since the last exchange, and those of all ranks.

A step's loss is the mean over the *global* batch. To know it costs an exchange between the ranks, so a few steps are
collected and exchanged at once (`run_numbers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ...runlog.tables import StepLoss
from ..data.loader import Batch

_Value = Tensor | float


def _value_of(loss: Tensor) -> _Value:
    """Return a copy, as the script may change the loss later: of a CPU's tensor a number, which costs least. A GPU's
    stays there, so that nothing waits for it until the ranks exchange."""
    if loss.device.type == "cpu":
        return loss.item()
    return loss.detach().to(torch.float32, copy=True).reshape(())


def _numbers(values: Sequence[_Value]) -> list[float]:
    """Return the numbers. All tensors among them come to the host in one copy."""
    tensors = [each for each in values if isinstance(each, Tensor)]
    copied = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(copied) if isinstance(each, Tensor) else each for each in values]


@dataclass
class _AnyStep:
    number: int
    epoch: int
    global_samples: int = 0  # of all ranks and all batches


_S = TypeVar("_S", bound=_AnyStep)


class _Collected(Generic[_S]):
    """The steps whose losses wait for the next exchange."""

    def __init__(self) -> None:
        self._steps: list[_S] = []

    @property
    def steps(self) -> int:
        """Return the number of steps that were collected."""
        return len(self._steps)

    @property
    def samples(self) -> int:
        """Return their samples on all ranks."""
        return sum(each.global_samples for each in self._steps)

    def drop_step(self) -> None:
        """Forget the running step."""
        self._steps.pop()


@dataclass
class _Step(_AnyStep):
    batches: list[tuple[int, int]] = field(default_factory=list)  # samples of this rank, and of all ranks
    # Losses, each with the number of batches that had come, and its share.
    parts: list[tuple[_Value, int, float | Callable[[], float]]] = field(default_factory=list)
    loss: _Value | None = None  # this rank's mean

    @property
    def samples(self) -> float:
        """Return this rank's samples in a batch of the step's mean size."""
        if len(self.batches) == 1:
            return self.batches[0][0]
        return sum(map(self.samples_of, self.batches)) / len(self.batches)

    def samples_of(self, batch: tuple[int, int]) -> float:
        """Return the samples that this rank would have of a batch, if the batch had the step's mean size."""
        return batch[0] * (self.global_samples / (batch[1] * len(self.batches)))


class StepLosses(_Collected[_Step]):
    """The losses of steps of which each rank has a part of each batch."""

    def begin_batch(self, step: int, epoch: int, batch: Batch, batches: int) -> None:
        """Take the batch of a body that begins, the step that it belongs to, and the number of batches in that."""
        if not self._steps or self._steps[-1].number != step:
            self._steps.append(_Step(step, epoch))
        # Not the batch itself, whose data would stay in memory until the next exchange.
        self._steps[-1].batches.append((batch.samples, batch.global_samples))
        self._steps[-1].global_samples += batch.global_samples

    def add(self, loss: Tensor, share: float | Callable[[], float]) -> None:
        """Take a loss of the running step. It is a scalar, the mean over this rank's samples."""
        step = self._steps[-1]
        step.parts.append((_value_of(loss), len(step.batches), share))

    def end_step(self) -> None:
        """Add up the losses of a step whose last body is over, by their shares, as its gradients add up."""
        step = self._steps[-1]
        parts, step.parts = step.parts, []
        for loss, place, share in parts:
            # A weighted loss's share in its mean is known only now; it is 0 where there was nothing to count.
            batch, part = step.batches[place - 1], share() if callable(share) else share
            if batch[0] and part:  # else it is a mean of nothing, which is nan
                if part != 1.0 or len(step.batches) > 1:
                    loss = loss * (part / len(step.batches) * step.samples_of(batch) / step.samples)
                step.loss = loss if step.loss is None else step.loss + loss

    def drop_last(self) -> None:
        """Forget the batch of a body that was left before its end."""
        step = self._steps[-1]
        step.global_samples -= step.batches.pop()[1]
        step.parts = [part for part in step.parts if part[1] <= len(step.batches)]
        if not step.batches:
            self._steps.pop()

    def local_row(self) -> list[float]:
        """Two numbers for each of the collected steps: the sum of this rank's losses, and its samples."""
        means = iter(_numbers([step.loss for step in self._steps if step.loss is not None]))
        numbers: list[float] = []
        for step in self._steps:
            mean, samples = 0.0 if step.loss is None else next(means), step.samples
            # Of no samples the mean is nan, and must count as nothing.
            numbers += [mean * samples if samples else 0.0, 0 if step.loss is None else samples]
        return numbers

    def take(self, rows: Sequence[Sequence[float]]) -> list[StepLoss]:
        """The losses of the collected steps over all ranks, but for steps for which no rank gave one."""
        totals = [sum(column) for column in zip(*rows, strict=True)]
        losses = [
            StepLoss(step.number, step.epoch, total / count, step.global_samples)
            for step, total, count in zip(self._steps, totals[::2], totals[1::2], strict=True)
            if count
        ]
        self._steps = []
        return losses


@dataclass
class _ShardStep(_AnyStep):
    batches: int = 1  # global ones
    body: int = -1  # that ran last, of this rank in the step
    # Losses, each times its weight, with the body; and what counts as weight.
    parts: list[tuple[int, _Value, float]] = field(default_factory=list)


class ShardLosses(_Collected[_ShardStep]):
    """The losses of steps whose batches are cut into logical shards, with the methods of `StepLosses`.

    A step's loss is the sum of all shards' losses, each times its weight, over the sum of the weights: each a sum in
    the order of the shards, wherever they were computed.

    Args:
        own: this rank's shards, of `shards`.
    """

    def __init__(self, own: range, shards: int) -> None:
        super().__init__()
        self._own, self._shards = own, shards
        self._batch: Batch | None = None

    def begin_batch(self, step: int, epoch: int, batch: Batch, batches: int) -> None:
        """Take the batch of a body that begins, the step that it belongs to, and the number of batches in that."""
        if not self._steps or self._steps[-1].number != step:
            self._steps.append(_ShardStep(step, epoch, batches=batches))
        running = self._steps[-1]
        running.body += 1
        running.global_samples += batch.global_samples * (running.body < batches)  # a batch comes once for each shard
        self._batch = batch

    def add(self, loss: Tensor, share: float | Callable[[], float]) -> None:
        """Take a loss of the running step, a scalar; `share` is a function where the loss has a weight of its own."""
        step, batch = self._steps[-1], self._batch
        assert batch is not None
        factor = batch.weight if callable(share) else batch.weight * share / step.batches
        step.parts.append((step.body, _value_of(loss) * factor, share() if callable(share) else factor))

    def end_step(self) -> None:
        """The last body of a step is over."""

    def drop_last(self) -> None:
        """Forget the batch of a body that was left before its end."""
        step = self._steps[-1]
        step.parts = [part for part in step.parts if part[0] < step.body]
        if step.body < step.batches and self._batch is not None:
            step.global_samples -= self._batch.global_samples
        step.body -= 1
        if step.body < 0:
            self._steps.pop()

    def local_row(self) -> list[float]:
        """Two numbers for each shard of each collected step: the sum of losses, and that of weights; 0 for others'."""
        row = [0.0] * (2 * self._shards * len(self._steps))
        parts = [(place, part) for place, step in enumerate(self._steps) for part in step.parts]
        values = _numbers([part[1] for _, part in parts])
        weighed = None
        for (place, (body, _, weight)), value in zip(parts, values, strict=True):
            shard = self._own[body // self._steps[place].batches]
            column = 2 * (place * self._shards + shard)
            row[column] += value if weight else 0.0  # of nothing the mean is nan
            # Several losses of a body, of several models, add up: its samples count once.
            row[column + 1] += weight if weighed != (place, body) else 0.0
            weighed = place, body
        return row

    def take(self, rows: Sequence[Sequence[float]]) -> list[StepLoss]:
        """The losses of the collected steps, but for steps for which no rank gave one."""
        columns = [sum(column) for column in zip(*rows, strict=True)]  # each is one rank's, and zeros
        losses = []
        for place, step in enumerate(self._steps):
            of_step = columns[2 * place * self._shards :][: 2 * self._shards]
            total, count = sum(of_step[::2]), sum(of_step[1::2])
            if count:
                losses.append(StepLoss(step.number, step.epoch, total / count, step.global_samples))
        self._steps = []
        return losses
