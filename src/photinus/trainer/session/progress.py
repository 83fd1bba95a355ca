"""The display while a model trains: one bar on a terminal, one line per epoch, on rank 0 only."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ...runlog.units import count, number
from ..checkpoint.position import Length

_bar: Any = None  # the bar on the terminal, if there is one: lines are printed above it


def say(text: str) -> None:
    """Prints a line on standard output, above the progress bar if one is there. For rank 0."""
    if _bar is not None:
        _bar.clear()
    print(text, flush=True)
    if _bar is not None:
        _bar.refresh()


def show_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics as one reads them: `accuracy 0.9778  loss 0.0713`."""
    return "  ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in metrics.items())


class Progress:
    """The bar of the running epoch on a terminal, and a line at each epoch's end everywhere.

    Without a terminal (a log file, a pipe) or without tqdm there is no bar, only the lines.

    Args:
        shown: whether this process shows anything (rank 0, and the user wants it).
        length: of the whole run; by steps, the bar is of all its steps.
        batches, accumulate: of an epoch (None: not known); of a step.
    """

    def __init__(self, shown: bool, length: Length, batches: int | None, accumulate: int) -> None:
        self.shown = shown
        self._length, self._batches, self._accumulate = length, batches, accumulate
        self._wants_bar = shown and sys.stderr.isatty()

    def start_epoch(self, epoch: int, done: int, step: int, samples_per_batch: int) -> None:
        """Begins the bar of epoch `epoch` (from 1), of which `done` batches are done; of the whole run `step` steps."""
        global _bar
        self.close()
        if not self._wants_bar:
            return
        try:
            from tqdm import tqdm
        except ImportError:
            self._wants_bar = False
            return
        total = self._batches
        if self._length.steps is not None:
            total, done = self._length.steps * self._accumulate, step * self._accumulate
        _bar = tqdm(
            total=total and total * samples_per_batch,
            initial=done * samples_per_batch,
            desc=self._place(epoch, step),
            unit=" samples",
            unit_scale=True,
            leave=False,
            dynamic_ncols=True,
            file=sys.stderr,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}, {rate_fmt}{postfix}",
        )

    def step(self, samples: int, newest: Mapping[str, float]) -> None:
        """One batch of `samples` samples (of all ranks) is done; `newest` are the numbers known last."""
        if _bar is not None and self.shown:
            if newest:
                _bar.set_postfix_str(show_metrics(newest), refresh=False)
            _bar.update(samples)

    def end_row(self, row: Mapping[str, float], shown: Mapping[str, float], *, epoch_ended: bool = True) -> None:
        """Prints a line for a row of metrics.csv, with what is to be `shown` of it; an epoch's end ends the bar."""
        if epoch_ended:
            self.close()
        if self.shown:
            place = self._place(int(row["epoch"]), int(row["step"]))
            if not epoch_ended and self._length.steps is None:
                place += f", step {int(row['step'])}"
            say(f"{place}  {show_metrics(shown)}  {count(row['samples_per_s'])} samples/s  {row['elapsed_s']:.1f} s")

    def _place(self, epoch: int, step: int) -> str:
        wanted = self._length.wanted
        count, word = (epoch, "epoch") if self._length.steps is None else (step, "step")
        return f"{word} {count:{len(str(wanted))}}/{wanted}"

    def close(self) -> None:
        """Takes the bar off the terminal."""
        global _bar
        if _bar is not None and self.shown:
            _bar.close()
            _bar = None
