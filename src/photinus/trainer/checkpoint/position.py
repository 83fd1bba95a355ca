"""The progress and the length of a run, which a checkpoint keeps beside weights and random numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ...errors import CheckpointError
from ...parallel.exchange.agreement import JSON
from ...runlog.tables import Row, StepLoss
from ...runlog.units import plural
from ..data.arguments import whole_number

_OF_THIS_START = ("part_began", "samples_in_part", "newest", "told_not_finite")


@dataclass
class Position:
    """The place between two bodies of a loop. Saved but for the fields below the line.

    Attributes:
        epochs_done: epochs finished.
        batches_done: batches of the running epoch that are done; 0 between two epochs.
        step: steps of the optimizer that are done, over the whole run.
        start: which start of the run this is, from 1.
        stopped_of: when the run was stopped early, the number of epochs (or steps) it was to have; else 0.
        loss_sum, loss_samples: since the last row, for its mean.
        elapsed_s: seconds of training (validation and checkpoints left out) of all starts, up to the last row, or to
            the checkpoint that was loaded since.
        logged: what the body logged since the last row.
        rate: learning rate of the last step of the (first) optimizer; None before it, and where it is not known.
        history: the rows of metrics.csv: one per epoch, or per validation.
    """

    epochs_done: int = 0
    batches_done: int = 0
    step: int = 0
    start: int = 1
    stopped_of: int = 0
    loss_sum: float = 0.0
    loss_samples: int = 0
    elapsed_s: float = 0.0
    logged: dict[str, float] = field(default_factory=dict)
    rate: Any = None
    history: list[Row] = field(default_factory=list)
    # -- of this start only ------------------------------------------------------------------------------------------
    part_began: float = 0.0  # clock at which this start began to work on the row
    samples_in_part: int = 0  # samples of the row that this start has trained on, over all ranks
    newest: Row = field(default_factory=dict)  # for the progress bar
    told_not_finite: bool = False

    def to_dict(self, clock_s: float) -> dict[str, Any]:
        """Return what a checkpoint keeps, as plain numbers, lists and dicts; the running row's time so far is in it."""
        saved = {name: getattr(self, name) for name in _saved_names()}
        if self.samples_in_part:
            saved["elapsed_s"] += clock_s - self.part_began
        return {**saved, "logged": dict(self.logged), "history": [dict(row) for row in self.history]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Position:
        """The position that `to_dict` described. Raises CheckpointError when something of it is missing."""
        missing = [name for name in _saved_names() if name not in {*saved, "rate"}]  # which came later
        if missing:
            raise CheckpointError(
                f"the checkpoint does not say {', '.join(missing)}: another version of Photinus wrote it"
            )
        return cls(**{name: saved[name] for name in _saved_names() if name in saved})

    def begin(self, clock_s: float) -> None:
        """Bodies begin, or go on after a body was left early, whose row goes on."""
        if not self.samples_in_part:
            self.part_began = clock_s

    def leave_out(self, seconds: float) -> None:
        """A checkpoint took these seconds, which are no part of the row's."""
        self.part_began += seconds

    def add_loss(self, step_loss: StepLoss) -> None:
        """Adds a step's loss to the running row's mean."""
        self.loss_sum += step_loss.loss * step_loss.samples
        self.loss_samples += step_loss.samples
        self.newest["loss"] = step_loss.loss

    def end_row(self, clock_s: float, learning_rate: float, *, whole: bool = True) -> Row:
        """Closes the row and returns it; it is also the last of the history.

        Args:
            whole: False where the run ends before the row would: it is a provisional one then, of what is done of it.
        """
        seconds = max(clock_s - self.part_began, 1e-9)
        self.elapsed_s += seconds
        row: Row = {
            "epoch": self.epochs_done + 1,
            "step": self.step,
            "loss": self.loss_sum / self.loss_samples if self.loss_samples else math.nan,
            "learning_rate": learning_rate,
            **self.logged,
            "samples_per_s": self.samples_in_part / seconds,
            "elapsed_s": self.elapsed_s,
            "start": self.start,
        }
        self.history.append(row)
        self.newest = dict(self.logged)
        self.part_began, self.samples_in_part = clock_s, 0
        if whole:
            self.loss_sum, self.loss_samples, self.logged = 0.0, 0, {}
        return row

    def end_epoch(self) -> None:
        """The running epoch is done, and the next one begins."""
        self.epochs_done += 1
        self.batches_done = 0

    def go_on(self) -> None:
        """The run goes on where it had ended. A last row whose losses are kept was provisional."""
        if self.history and self.history[-1]["step"] == self.step and self.loss_samples:
            self.history.pop()

    def description(self, place: str) -> dict[str, JSON]:
        """The place, in words and numbers, for a checkpoint's manifest, to be read without loading it."""
        last = self.history[-1] if self.history else {}
        return {
            "place": place,
            "epochs_done": self.epochs_done,
            "batches_done": self.batches_done,
            "last_epoch": dict(last),
        }


def _saved_names() -> list[str]:
    return [each.name for each in fields(Position) if each.name not in _OF_THIS_START]


@dataclass(frozen=True)
class Length:
    """After how many epochs, or after how many steps, a run ends: one of both is None.

    Raises:
        TypeError: both or none of them are given, or one is no whole number.
        ValueError: below 1.
    """

    epochs: int | None
    steps: int | None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise TypeError(
                f"epochs={self.epochs} and steps={self.steps}: exactly one of both is needed, as the length of the run"
            )
        name = "steps" if self.epochs is None else "epochs"
        object.__setattr__(self, name, whole_number(name, self.wanted, least=1))  # numpy's numbers are not JSON's

    @property
    def wanted(self) -> int:
        """Return how many epochs or steps were asked for."""
        wanted = self.steps if self.epochs is None else self.epochs
        assert wanted is not None, "one of both is given"
        return wanted

    @property
    def unit(self) -> str:
        """The unit that it counts."""
        return "steps" if self.epochs is None else "epochs"

    def reached(self, position: Position) -> bool:
        """Return whether the run is done, or was stopped early."""
        done = position.step if self.epochs is None else position.epochs_done
        return done >= self.wanted or position.stopped_of >= self.wanted

    def epochs_of(self, position: Position, batches: int, accumulate: int) -> int:
        """The number of epochs of the run, the last perhaps in part. Those done may have had other batches.

        Args:
            batches, accumulate: of an epoch; of a step. An epoch's end closes a step.
        """
        if self.epochs is not None:
            return self.epochs
        left = max(0, self.wanted - position.step) + -(-position.batches_done // accumulate)
        return position.epochs_done + -(-left // -(-batches // accumulate))

    def steps_of(self, position: Position, batches: int, accumulate: int) -> int:
        """The number of steps of the run. Those done may have had other batches."""
        if self.epochs is None:
            return self.wanted
        epochs = self.epochs - position.epochs_done
        if epochs <= 0:
            return position.step
        return (
            position.step
            + -(-(batches - position.batches_done) // accumulate)
            + (epochs - 1) * -(-batches // accumulate)
        )

    def describe(self, position: Position) -> str:
        """The place in words: `epoch 3 of 15, 12 batches done, step 56`."""
        if self.epochs is None:
            return f"step {position.step} of {self.steps}, in epoch {position.epochs_done + 1}"
        if position.batches_done:
            batches = f"{position.batches_done} batch{'es' * (position.batches_done > 1)}"
            return f"epoch {position.epochs_done + 1} of {self.epochs}, {batches} done, step {position.step}"
        return f"{position.epochs_done} of {self.epochs} epochs done, step {position.step}"

    def describe_end(self, position: Position) -> str:
        """Return, as a text, how the run ended, or how far it is."""
        if position.stopped_of or not self.reached(position):
            return f"stopped: {self.describe(position)}"
        counts = {"epoch": position.epochs_done, "step": position.step}  # a run by steps may have no whole epoch
        return "finished: " + ", ".join(plural(count, unit) for unit, count in counts.items() if count)

    def describe_nothing_to_do(self, position: Position) -> tuple[str, str]:
        """Why a run that is resumed is over, and what to do about it."""
        done = (
            "the run was stopped early"
            if position.stopped_of
            else f"{self.wanted} of {plural(self.wanted, self.unit[:-1])} done"
        )
        more = max(self.wanted, position.stopped_of, position.step if self.epochs is None else position.epochs_done)
        return done, f"give {self.unit}=N with N above {more} to train more, or resume='never' to start over"
