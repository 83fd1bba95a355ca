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
from collections.abc import Sequence
from itertools import accumulate
from operator import add

import torch
import torch.distributed as dist

from ...parallel.exchange.agreement import together
from ...parallel.exchange.collectives import gather_numbers, resolve_group
from ...runlog.tables import MEMORY, PHASES, Window
from ..checkpoint.position import Position
from ..session.replicas import Replicas
from ..session.session import Session
from .run_folder import RunFolder
from .step_clock import StepClock
from .step_losses import ShardLosses, StepLosses

_PHASES, _MEMORY = len(PHASES), len(MEMORY)
_LINK = 3  # the peer of the slowest link, plus one; its seconds; those of the median one
_WIDTH = _PHASES + _MEMORY + _LINK
MOST_STEPS = 16
_PAUSE_S = 1.0
_LOOK_S = 0.1  # between two looks at the memory, which cost more than a short step
_WRITTEN_AT_FIRST = 2000  # windows; from then on they get longer, so that a run of days does not fill the disk
_RANKS_WRITTEN_AT_ONCE = 32


class RunNumbers:
    """The numbers of a loop since the ranks last exchanged them; whether they still train the same rides along.

    Attributes:
        losses: of this rank, in the order of steps.
    """

    def __init__(
        self, session: Session, clock: StepClock, replicas: Replicas, losses: StepLosses | ShardLosses
    ) -> None:
        self._session = session
        self._times = RankTimes(session, clock)
        self._replicas = replicas
        self.losses = losses

    @property
    def due(self) -> bool:
        """Return whether it is time to exchange; equal on all ranks."""
        return self.losses.steps >= self._times.steps_to_next

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
        steps, samples = self.losses.steps, self.losses.samples
        file_error = folder.error
        flags = [float(file_error is not None), *map(float, wishes)]
        parts = [self.losses.local_row(), flags, self._times.local_row(), self._replicas.local_row(saves=saves)]
        own = [number for part in parts for number in part]
        rows = [own]
        if self._session.world_size > 1:
            rows = gather_numbers(own, resolve_group(None), torch.float64)
        ends = [*accumulate(map(len, parts))]
        loss_rows, flag_rows, time_rows, replica_rows = (
            [row[end - len(part) : end] for row in rows] for part, end in zip(parts, ends, strict=True)
        )
        losses = self.losses.take(loss_rows)
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
        self._looked_s, self._own_memory = -math.inf, (0, 0, 0, 0)
        self._forget()

    def _forget(self) -> None:
        self._steps = self._samples = 0
        self._sums = [[0.0] * _WIDTH for _ in range(self._session.world_size)]
        self._slowest: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(self._session.world_size)]

    def local_row(self) -> list[float]:
        """This rank's times since the last exchange, its memory and its links: 13 numbers."""
        now_s = time.perf_counter()
        if now_s - self._looked_s > _LOOK_S:
            self._looked_s, self._own_memory = now_s, memory_bytes(self._session.device)
        return [*self._clock.take(), *map(float, self._own_memory), *self._links()]

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
        # Lists: of a few ranks, a tensor's operations take longer than short steps allow.
        self._sums = [[*map(add, sums, row)] for sums, row in zip(self._sums, rows, strict=True)]
        self._memory = [[*map(int, row[_PHASES : _PHASES + _MEMORY])] for row in rows]
        for slowest, (peer, worst_s, _) in zip(self._slowest, (row[-_LINK:] for row in rows), strict=True):
            slowest[int(peer) - 1] += worst_s
        self._steps += steps
        self._samples += samples
        total_s = max(sum(row[:_PHASES]) for row in rows)
        if steps:
            longest_s = total_s / steps
            self.steps_to_next = max(1, min(MOST_STEPS, int(_PAUSE_S / longest_s))) if longest_s > 0 else MOST_STEPS
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
        means = [[each / self._steps for each in column] for column in zip(*self._sums, strict=True)]
        links = []
        for slowest, usual_s in zip(self._slowest, means[-1], strict=True):
            peer = max(slowest, key=lambda each: slowest[each])
            links.append((peer, slowest[peer] / self._steps, usual_s))
        phases = dict(zip(PHASES, means[:_PHASES], strict=True))
        memory = {name: [*column] for name, column in zip(MEMORY, zip(*self._memory, strict=True), strict=True)}
        window = Window(time.time(), step, epoch, start, self._steps, self._samples, phases, memory, links)
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
    gpu = device.type == "cuda" and (torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    return (found["VmRSS"], found["VmHWM"], *(gpu or (0, 0)))
