"""The losses of a loop's steps: each rank's since the last exchange, and those of all ranks.

A step's loss is the mean over the *global* batch. To know it costs an exchange between the ranks, so a few steps are
collected and exchanged at once (`run_numbers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...runlog.tables import StepLoss
from ..data.loader import Batch


@dataclass
class _Step:
    number: int
    epoch: int
    batches: list[Batch] = field(default_factory=list)
    global_samples: int = 0  # of all ranks and all batches
    # Losses, each with the number of batches that had come, and its share.
    parts: list[tuple[Tensor, int, float | Callable[[], float]]] = field(default_factory=list)
    loss: Tensor | None = None  # this rank's mean, on its device: nothing waits for that until `exchange`

    @property
    def samples(self) -> float:
        """Return this rank's samples in a batch of the step's mean size."""
        if len(self.batches) == 1:
            return self.batches[0].samples
        return sum(map(self.samples_of, self.batches)) / len(self.batches)

    def samples_of(self, batch: Batch) -> float:
        """Return the samples that this rank would have of a batch, if the batch had the step's mean size."""
        return batch.samples * (self.global_samples / (batch.global_samples * len(self.batches)))


class StepLosses:
    """The losses of steps of which each rank has a part of each batch."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    @property
    def steps(self) -> int:
        """Return the number of steps that were collected."""
        return len(self._steps)

    @property
    def samples(self) -> int:
        """Return their samples on all ranks."""
        return sum(each.global_samples for each in self._steps)

    def begin_batch(self, step: int, epoch: int, batch: Batch, batches: int) -> None:
        """Take the batch of a body that begins, the step that it belongs to, and the number of batches in that."""
        if not self._steps or self._steps[-1].number != step:
            self._steps.append(_Step(step, epoch))
        self._steps[-1].batches.append(batch)
        self._steps[-1].global_samples += batch.global_samples

    def add(self, loss: Tensor, share: float | Callable[[], float]) -> None:
        """Take a loss of the running step. It is a scalar, the mean over this rank's samples."""
        step, value = self._steps[-1], loss.detach().to(torch.float32, copy=True).reshape(())
        step.parts.append((value, len(step.batches), share))

    def end_step(self) -> None:
        """Add up the losses of a step whose last body is over, by their shares, as its gradients add up."""
        step = self._steps[-1]
        parts, step.parts = step.parts, []
        for loss, place, share in parts:
            # A weighted loss's share in its mean is known only now; it is 0 where there was nothing to count.
            batch, part = step.batches[place - 1], share() if callable(share) else share
            if batch.samples and part:  # else it is a mean of nothing, which is nan
                if part != 1.0 or len(step.batches) > 1:
                    loss = loss * (part / len(step.batches) * step.samples_of(batch) / step.samples)
                step.loss = loss if step.loss is None else step.loss + loss

    def drop_last(self) -> None:
        """Forget the batch of a body that was left before its end."""
        step = self._steps[-1]
        step.global_samples -= step.batches.pop().global_samples
        step.parts = [part for part in step.parts if part[1] <= len(step.batches)]
        if not step.batches:
            self._steps.pop()

    def drop_step(self) -> None:
        """Forget the running step."""
        self._steps.pop()

    def local_row(self) -> list[float]:
        """Two numbers for each of the collected steps: the sum of this rank's losses, and its samples."""
        # Stacked where they are, then one copy to the host.
        losses = [step.loss for step in self._steps if step.loss is not None]
        means = iter(torch.stack(losses).tolist() if losses else [])
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
class _ShardStep:
    number: int
    epoch: int
    batches: int  # global ones
    samples: int = 0  # of all ranks
    body: int = -1  # that ran last, of this rank in the step
    # Losses, each times its weight, with the body; and what counts as weight.
    parts: list[tuple[int, Tensor, float]] = field(default_factory=list)


class ShardLosses:
    """The losses of steps whose batches are cut into logical shards, with the methods of `StepLosses`.

    A step's loss is the sum of all shards' losses, each times its weight, over the sum of the weights: each a sum in
    the order of the shards, wherever they were computed.

    Args:
        own: this rank's shards, of `shards`.
    """

    def __init__(self, own: range, shards: int) -> None:
        self._own, self._shards = own, shards
        self._steps: list[_ShardStep] = []
        self._batch: Batch | None = None

    @property
    def steps(self) -> int:
        """Return the number of steps that were collected."""
        return len(self._steps)

    @property
    def samples(self) -> int:
        """Return their samples on all ranks."""
        return sum(each.samples for each in self._steps)

    def begin_batch(self, step: int, epoch: int, batch: Batch, batches: int) -> None:
        """Take the batch of a body that begins, the step that it belongs to, and the number of batches in that."""
        if not self._steps or self._steps[-1].number != step:
            self._steps.append(_ShardStep(step, epoch, batches))
        running = self._steps[-1]
        running.body += 1
        running.samples += batch.global_samples * (running.body < batches)  # a batch comes once for each shard
        self._batch = batch

    def add(self, loss: Tensor, share: float | Callable[[], float]) -> None:
        """Take a loss of the running step, a scalar; `share` is a function where the loss has a weight of its own."""
        step, batch = self._steps[-1], self._batch
        assert batch is not None
        factor = batch.weight if callable(share) else batch.weight * share / step.batches
        value = loss.detach().to(torch.float32, copy=True).reshape(())
        step.parts.append((step.body, value * factor, share() if callable(share) else factor))

    def end_step(self) -> None:
        """The last body of a step is over."""

    def drop_last(self) -> None:
        """Forget the batch of a body that was left before its end."""
        step = self._steps[-1]
        step.parts = [part for part in step.parts if part[0] < step.body]
        if step.body < step.batches and self._batch is not None:
            step.samples -= self._batch.global_samples
        step.body -= 1
        if step.body < 0:
            self._steps.pop()

    def drop_step(self) -> None:
        """Forget the running step."""
        self._steps.pop()

    def local_row(self) -> list[float]:
        """Two numbers for each shard of each collected step: the sum of losses, and that of weights; 0 for others'."""
        row = [0.0] * (2 * self._shards * len(self._steps))
        parts = [(place, part) for place, step in enumerate(self._steps) for part in step.parts]
        values = torch.stack([part[1] for _, part in parts]).tolist() if parts else []
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
                losses.append(StepLoss(step.number, step.epoch, total / count, step.samples))
        self._steps = []
        return losses
