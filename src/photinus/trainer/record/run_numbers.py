"""The measurements of a run: each rank collects its losses and times, and rank 0 writes those of all.

A step's loss is the mean over the *global* batch. To know it costs an exchange between the ranks, so a few steps are
collected and exchanged at once. The files that hold the numbers are those of `photinus.runlog`.

Every rank's times and memory travel in that exchange, too. So they come to the run's folder from hosts that share no
disk, and rank 0 alone writes. What it costs is thirteen float64 values per rank in an exchange that takes place anyway.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ...parallel.exchange.agreement import together
from ...parallel.exchange.collectives import gather_numbers, resolve_group
from ...runlog.tables import MEMORY, PHASES, StepLoss, Window
from ..checkpoint.position import Position
from ..data.loader import Batch
from ..session.replicas import Replicas
from ..session.session import Session
from .run_folder import RunFolder
from .step_clock import StepClock

_PHASES, _MEMORY = len(PHASES), len(MEMORY)
_LINK = 3  # the peer of the slowest link, plus one; its seconds; those of the median one
_WIDTH = _PHASES + _MEMORY + _LINK
_MOST_STEPS = 16
_PAUSE_S = 1.0
_WRITTEN_AT_FIRST = 2000  # windows; from then on they get longer, so that a run of days does not fill the disk
_RANKS_WRITTEN_AT_ONCE = 32


@dataclass
class _Step:
    number: int
    epoch: int
    batches: list[Batch] = field(default_factory=list)
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

    @property
    def global_samples(self) -> int:
        """Return the samples of all ranks and all batches of the step."""
        return sum(batch.global_samples for batch in self.batches)


class RunNumbers:
    """The numbers of a loop since the ranks last exchanged them; whether they still train the same rides along."""

    def __init__(self, session: Session, clock: StepClock, replicas: Replicas) -> None:
        self._session = session
        self._times = RankTimes(session, clock)
        self._replicas = replicas
        self._steps: list[_Step] = []

    @property
    def due(self) -> bool:
        """Return whether it is time to exchange; equal on all ranks."""
        return len(self._steps) >= self._times.steps_to_next

    def begin_batch(self, step: int, epoch: int, batch: Batch) -> None:
        """Take the batch of a body that begins, and the step that it belongs to."""
        if not self._steps or self._steps[-1].number != step:
            self._steps.append(_Step(step, epoch))
        self._steps[-1].batches.append(batch)

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
                factor = part / len(step.batches) * step.samples_of(batch) / step.samples
                loss = loss if factor == 1.0 else loss * factor
                step.loss = loss if step.loss is None else step.loss + loss

    def drop_last(self) -> None:
        """Forget the batch of a body that was left before its end."""
        step = self._steps[-1]
        step.batches.pop()
        step.parts = [part for part in step.parts if part[1] <= len(step.batches)]
        if not step.batches:
            self._steps.pop()

    def exchange(
        self, position: Position, folder: RunFolder, wishes: Sequence[bool], *, epoch: int, saves: bool
    ) -> list[bool]:
        """Brings the losses and times of all ranks together, and writes them on rank 0.

        Args:
            position: takes the losses.
            folder: to write to.
            wishes: of this rank.
            saves: whether a checkpoint follows; equal on all ranks.

        Returns:
            Of each wish whether any rank has it.

        Raises:
            OSError: rank 0 could not write; every rank raises.
            ValueError, ModelMismatchError: the ranks no longer train the same; see Replicas.
        """
        steps, samples = len(self._steps), sum(each.global_samples for each in self._steps)
        file_error = folder.error
        flags = [float(file_error is not None), *map(float, wishes)]
        parts = [self._local_losses(), flags, self._times.local_row(), self._replicas.local_row(saves=saves)]
        own = [number for part in parts for number in part]
        rows = [own]
        if self._session.world_size > 1:
            rows = gather_numbers(own, resolve_group(None), torch.float64)
        ends = [*accumulate(map(len, parts))]
        loss_rows, flag_rows, time_rows, replica_rows = (
            [row[end - len(part) : end] for row in rows] for part, end in zip(parts, ends, strict=True)
        )
        losses = self._take_losses(loss_rows)
        file_errors, *wished = map(any, zip(*flag_rows, strict=True))
        seconds = self._times.add(time_rows, steps=steps, samples=samples)
        self._replicas.compare(replica_rows, step=position.step, seconds=seconds)
        if file_errors:
            with together("writing the numbers of the run"):
                if file_error is not None:
                    raise file_error
        for step_loss in losses:
            position.add_loss(step_loss)
            if self._session.is_main and not math.isfinite(step_loss.loss) and not position.told_not_finite:
                position.told_not_finite = True
                warnings.warn(f"the loss is {step_loss.loss} at step {step_loss.step}", stacklevel=3)
                folder.record_event("warning", step_loss.step, text=f"the loss is {step_loss.loss}")
        if losses:
            folder.append_losses(losses, position.start)
        self.write_times(position, folder, epoch=epoch)
        return wished

    def _local_losses(self) -> list[float]:
        """Two numbers for each of the collected steps: the sum of this rank's losses, and its samples."""
        # Stacked where they are, then one copy to the host.
        given = [step.loss for step in self._steps if step.loss is not None]
        means = iter(torch.stack(given).tolist() if given else [])
        numbers: list[float] = []
        for step in self._steps:
            mean, samples = 0.0 if step.loss is None else next(means), step.samples
            # Of no samples the mean is nan, and must count as nothing.
            numbers += [mean * samples if samples else 0.0, 0 if step.loss is None else samples]
        return numbers

    def _take_losses(self, rows: Sequence[Sequence[float]]) -> list[StepLoss]:
        """The losses of the collected steps over all ranks, but for steps for which no rank gave one."""
        totals = [sum(column) for column in zip(*rows, strict=True)]
        losses = [
            StepLoss(step.number, step.epoch, total / count, step.global_samples)
            for step, total, count in zip(self._steps, totals[::2], totals[1::2], strict=True)
            if count
        ]
        self._steps = []
        return losses

    def write_times(self, position: Position, folder: RunFolder, *, epoch: int, at_once: bool = False) -> None:
        """Writes the uses of the last steps' time, if it is time to, or `at_once`, because the run ends."""
        if folder.writes:
            window = self._times.window(step=position.step, epoch=epoch, start=position.start, at_once=at_once)
            if window is not None:
                folder.append_window(window)


class RankTimes:
    """The times of all ranks between two exchanges, and on rank 0 the windows to write.

    Attributes:
        steps_to_next: after how many steps the ranks exchange next: about one second's worth, at most 16, equal on
            all ranks. So what is shown of a run is never older than a step or a second, whichever is longer.
    """

    def __init__(self, session: Session, clock: StepClock) -> None:
        self.steps_to_next = 1
        self._session = session
        self._clock = clock
        self._under_way_s = _under_way_s()
        self._began_s = self._written_s = time.perf_counter()
        self._forget()

    def _forget(self) -> None:
        self._steps = self._samples = 0
        self._sums = torch.zeros(self._session.world_size, _WIDTH, dtype=torch.float64, device="cpu")
        self._slowest: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(self._session.world_size)]

    def local_row(self) -> list[float]:
        """This rank's times since the last exchange, its memory and its links: 13 numbers."""
        return [*self._clock.take(), *map(float, memory_bytes(self._session.device)), *self._links()]

    def _links(self) -> tuple[float, float, float]:
        """Of this rank's links to other hosts since the last call; see _LINK."""
        before, self._under_way_s = self._under_way_s, _under_way_s()
        seconds = {peer: now_s - before.get(peer, 0.0) for peer, now_s in self._under_way_s.items()}
        if not seconds:
            return 0.0, 0.0, 0.0
        slowest = max(seconds, key=lambda peer: seconds[peer])
        return slowest + 1.0, seconds[slowest], statistics.median_low(seconds.values())

    def add(self, rows: Sequence[Sequence[float]], *, steps: int, samples: int) -> float:
        """Takes what `local_row` returned on each rank, and the steps and samples since the last exchange.

        Returns:
            The seconds that these steps took the slowest rank, equal on all ranks.
        """
        ranks = torch.tensor(rows, dtype=torch.float64, device="cpu")
        self._sums += ranks
        self._memory = ranks[:, _PHASES : _PHASES + _MEMORY]
        for slowest, (peer, worst_s, _) in zip(self._slowest, ranks[:, -_LINK:].tolist(), strict=True):
            slowest[int(peer) - 1] += worst_s
        self._steps += steps
        self._samples += samples
        total_s = float(ranks[:, :_PHASES].sum(dim=1).max())
        if steps:
            longest_s = total_s / steps
            self.steps_to_next = max(1, min(_MOST_STEPS, int(_PAUSE_S / longest_s))) if longest_s > 0 else _MOST_STEPS
        return total_s

    def window(self, *, step: int, epoch: int, start: int, at_once: bool) -> Window | None:
        """Return what to write now, if it is time: a second or more after the last one, and later less and less often.

        `at_once` does not wait longer: the run ends.
        """
        now_s = time.perf_counter()
        pause_s = max(_PAUSE_S, (now_s - self._began_s) / _WRITTEN_AT_FIRST)
        pause_s *= max(1.0, self._session.world_size / _RANKS_WRITTEN_AT_ONCE)
        if not self._steps or (now_s - self._written_s < pause_s and not at_once):
            return None
        self._written_s = now_s
        means = self._sums.T / self._steps
        links = []
        for slowest, usual_s in zip(self._slowest, means[-1].tolist(), strict=True):
            peer = max(slowest, key=lambda each: slowest[each])
            links.append((peer, slowest[peer] / self._steps, usual_s))
        window = Window(
            time_s=time.time(),
            step=step,
            epoch=epoch,
            start=start,
            steps=self._steps,
            samples=self._samples,
            phases=dict(zip(PHASES, means[:_PHASES].tolist(), strict=True)),
            memory=dict(zip(MEMORY, self._memory.T.long().tolist(), strict=True)),
            links=links,
        )
        self._forget()
        return window


def _under_way_s() -> dict[int, float]:
    """Of each link that the default group has with a rank of another host; {} where it does not tell."""
    told = getattr(dist.group.WORLD, "under_way_s", None) if dist.is_initialized() else None
    return told() if told is not None else {}


def memory_bytes(device: torch.device) -> tuple[int, int, int, int]:
    """(resident, peak resident, held by tensors on the GPU, the most of that), in bytes; 0 for what cannot be known.

    Costs some 30 us; on a GPU it asks torch's allocator, and does not wait for the device. The peak counts from the
    process's beginning.
    """
    found = {"VmHWM": 0, "VmRSS": 0}
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", encoding="utf-8") as file:
        lines = (line.replace(":", "").split() for line in file if line.startswith((*found,)))
        found |= {name: int(kib) * 1024 for name, kib, _ in lines}
    resident, peak = found["VmRSS"], found["VmHWM"]
    if device.type != "cuda":
        return resident, peak, 0, 0
    return resident, peak, torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
