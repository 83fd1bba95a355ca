"""What is measured in a run: each rank collects its losses and times, and rank 0 writes those of all."""

from __future__ import annotations

import math
import warnings

from torch import Tensor

from ...parallel.exchange.agreement import together
from ..checkpoint.position import Position
from ..data.loader import Batch
from ..session.replicas import Replicas
from ..session.session import Session
from .metrics import StepLosses
from .rank_times import RankTimes
from .run_folder import RunFolder
from .step_clock import StepClock

__all__ = ["RunNumbers"]


class RunNumbers:
    """The numbers of a loop since the ranks last exchanged them.

    Args:
        session: of this rank.
        clock: of this rank's steps.
        replicas: whether the ranks still train the same rides along.
    """

    def __init__(self, session: Session, clock: StepClock, replicas: Replicas) -> None:
        self._session = session
        self._losses = StepLosses()
        self._times = RankTimes(session, clock)
        self._replicas = replicas
        self._samples = 0  # of all ranks since the last exchange

    @property
    def due(self) -> bool:
        """Whether it is time to exchange; equal on all ranks."""
        return len(self._losses) >= self._times.steps_to_next

    def begin_step(self, step: int, epoch: int, batch: Batch) -> None:
        """The body of a batch begins."""
        self._losses.begin_step(step, epoch, batch.samples, batch.global_samples)

    def add(self, loss: Tensor) -> None:
        """Of the running step; several add up."""
        self._losses.add(loss)

    def end_step(self, batch: Batch) -> None:
        """The body of a batch is done."""
        self._samples += batch.global_samples

    def drop_last(self) -> None:
        """The body was left before its end, so its batch does not count."""
        self._losses.drop_last()

    def exchange(self, position: Position, folder: RunFolder | None, *, epoch: int, stop: bool, saves: bool) -> bool:
        """Brings the losses and times of all ranks together, and writes them on rank 0; whether any rank wants to stop.

        Args:
            position: where the loop is; takes the losses.
            folder: on rank 0, to write to, if anything is to be written.
            epoch: the running one, from 1.
            stop: whether this rank wants to stop.
            saves: whether a checkpoint follows; equal on all ranks.

        Raises:
            OSError: rank 0 could not write; every rank raises.
            ValueError, ModelMismatchError: the ranks no longer train the same; see Replicas.
        """
        session, steps = self._session, len(self._losses)
        file_error = folder.error if folder is not None else None
        times, digests = self._times.mine(), self._replicas.mine(saves=saves)
        sent = [float(stop), float(file_error is not None), *times, *digests]
        losses, (stops, file_errors, *rest) = self._losses.exchange(sent, session.world_size, session.exchange_device)
        seconds = self._times.add(rest[: len(times)], steps=steps, samples=self._samples)
        self._replicas.compare(rest[len(times) :], step=position.step, seconds=seconds)
        self._samples = 0
        if file_errors:
            with together("writing the numbers of the run"):
                if file_error is not None:
                    raise file_error
        for step_loss in losses:
            position.add_loss(step_loss)
            if session.is_main and not math.isfinite(step_loss.loss) and not position.told_not_finite:
                position.told_not_finite = True
                warnings.warn(f"the loss is {step_loss.loss} at step {step_loss.step}", stacklevel=3)
                if folder is not None:
                    folder.tell("warning", step_loss.step, text=f"the loss is {step_loss.loss}")
        if folder is not None and losses:
            folder.append_losses(losses, position.start)
        self.write_times(position, folder, epoch=epoch)
        return bool(stops)

    def write_times(self, position: Position, folder: RunFolder | None, *, epoch: int, at_once: bool = False) -> None:
        """Where the time of the last steps went, if it is time to write that; or `at_once`, because the run ends."""
        if folder is not None:
            window = self._times.window(step=position.step, epoch=epoch, start=position.start, at_once=at_once)
            if window is not None:
                folder.append_window(window)
