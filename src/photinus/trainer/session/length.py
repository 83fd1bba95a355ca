"""How long a run is: so many epochs, or so many steps, counted from its very start."""

from __future__ import annotations

from dataclasses import dataclass

from ...runlog.units import plural
from ..checkpoint.position import Position
from ..data.arguments import whole_number


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
                f"epochs={self.epochs} and steps={self.steps} are given, but exactly one of both is needed: it says "
                f"when the run ends"
            )
        whole_number("steps" if self.epochs is None else "epochs", self.wanted, least=1)

    @property
    def wanted(self) -> int:
        """The number, of whatever it counts."""
        wanted = self.steps if self.epochs is None else self.epochs
        assert wanted is not None, "one of both is given"
        return wanted

    @property
    def unit(self) -> str:
        """What it counts."""
        return "steps" if self.epochs is None else "epochs"

    def reached(self, position: Position) -> bool:
        """Whether the run is done, or was stopped early."""
        done = position.step if self.epochs is None else position.epochs_done
        return done >= self.wanted or position.stopped_of >= self.wanted

    def epoch_ends(self, position: Position, steps_per_epoch: int) -> bool:
        """Whether the epoch ends with the next step: with its last batch, or because the run does."""
        return position.batches_done + 1 == steps_per_epoch or position.step + 1 == self.steps

    def epochs_of(self, position: Position, steps_per_epoch: int) -> int:
        """How many epochs the run has, the last of them perhaps in part. Those done may have had other batches."""
        if self.epochs is not None:
            return self.epochs
        left = max(0, self.wanted - position.step) + position.batches_done
        return position.epochs_done + -(-left // steps_per_epoch)

    def steps_of(self, position: Position, steps_per_epoch: int) -> int:
        """How many steps the run has. Those done may have had other batches."""
        if self.epochs is None:
            return self.wanted
        left = (self.epochs - position.epochs_done) * steps_per_epoch - position.batches_done
        return position.step + max(0, left)

    def describe(self, position: Position) -> str:
        """The place in words: `epoch 3 of 15, 12 batches done, step 56`."""
        if self.epochs is None:
            return f"step {position.step} of {self.steps}, in epoch {position.epochs_done + 1}"
        if position.batches_done:
            where = f"epoch {position.epochs_done + 1} of {self.epochs}"
            return f"{where}, {position.batches_done} batches done, step {position.step}"
        return f"{position.epochs_done} of {self.epochs} epochs done, step {position.step}"

    def describe_end(self, position: Position) -> str:
        """How the run ended, in words, or where it stands."""
        if position.stopped_of or not self.reached(position):
            return f"stopped: {self.describe(position)}"
        return f"finished: {plural(position.epochs_done, 'epoch')}, {plural(position.step, 'step')}"

    def describe_nothing_to_do(self, position: Position) -> tuple[str, str]:
        """Why a run that is resumed is over, and what to do about it."""
        done = (
            "the run was stopped early"
            if position.stopped_of
            else f"{self.wanted} of {plural(self.wanted, self.unit[:-1])} done"
        )
        more = max(self.wanted, position.stopped_of, position.step if self.epochs is None else position.epochs_done)
        return done, f"use --{self.unit} N with N above {more}, or resume='never' to start over"
