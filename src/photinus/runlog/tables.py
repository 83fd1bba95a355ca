"""The two CSV files of a run: `losses.csv`, a row per step, and `metrics.csv`, a row per epoch or per validation.

The files survive restarts: what a killed process wrote after its last checkpoint is dropped when the run goes on, so no
row comes twice and none is missing.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .files import plain_file, write_atomically

LOSSES, METRICS = "losses.csv", "metrics.csv"
OWN_COLUMNS = frozenset({"epoch", "step", "loss", "learning_rate", "samples_per_s", "elapsed_s", "start"})
"""Columns of metrics.csv that a loop fills itself; all others are what the user logged."""

Row = dict[str, float]


@dataclass(frozen=True)
class StepLoss:
    """The loss of one step: its mean over the samples of the global batch, and how many those were."""

    step: int
    epoch: int
    loss: float
    samples: int


class RunFiles:
    """`losses.csv` (a row per step) and `metrics.csv` (a row per epoch) in the run's folder. For rank 0.

    losses.csv: step, epoch, loss, start. metrics.csv: epoch, step, loss, what the user logged, samples_per_s,
    elapsed_s, start. `start` counts the times that the run was started or resumed, from 1.
    """

    LOSS_COLUMNS = ("step", "epoch", "loss", "start")

    def __init__(self, folder: Path) -> None:
        self.losses = folder / LOSSES
        self.metrics = folder / METRICS

    def go_on_from(self, step: int, history: Sequence[Row]) -> None:
        """Drops all rows after `step`, and a line that a killed process wrote only half of."""
        kept = [row for row in read_rows(self.losses) if row["step"] <= step and set(row) == set(self.LOSS_COLUMNS)]
        write_atomically(self.losses, _table(self.LOSS_COLUMNS, kept))
        self.write_metrics(history)

    def append_losses(self, losses: Iterable[StepLoss], start: int) -> None:
        """Appends rows to losses.csv."""
        rows = [{"step": x.step, "epoch": x.epoch, "loss": x.loss, "start": start} for x in losses]
        with open(self.losses, "a", newline="", encoding="utf-8", opener=plain_file) as file:
            if file.tell() == 0:
                file.write(_table(self.LOSS_COLUMNS, []))
            file.write(_table(self.LOSS_COLUMNS, rows, header=False))

    def make_durable(self) -> None:
        """Makes the rows of losses.csv outlive a power cut; a checkpoint relies on those before it."""
        with open(self.losses, "a", encoding="utf-8", opener=plain_file) as file:
            os.fsync(file.fileno())

    def write_metrics(self, history: Sequence[Row]) -> None:
        """Writes metrics.csv anew; it has one row per epoch, and columns may appear at any epoch."""
        last = ("samples_per_s", "elapsed_s", "start")
        names: dict[str, None] = {"epoch": None, "step": None, "loss": None}
        for row in history:
            names.update(dict.fromkeys(name for name in row if name not in last))
        write_atomically(self.metrics, _table((*names, *last), history))


def read_rows(path: Path) -> list[Row]:
    """The rows of one of a run's CSV files; empty cells are left out, a half-written last line too.

    A missing file has no rows.

    Raises:
        ValueError: a line holds something else than numbers.
    """
    try:
        with open(path, encoding="utf-8", opener=plain_file) as file:
            text = file.read()
    except FileNotFoundError:
        return []
    complete = text[: text.rfind("\n") + 1]
    rows = []
    for row in csv.DictReader(io.StringIO(complete)):
        try:
            rows.append({name: float(cell) for name, cell in row.items() if cell})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: the line {dict(row)} holds no numbers; was the file edited?") from error
    return rows


def _table(columns: Sequence[str], rows: Iterable[Mapping[str, float]], header: bool = True) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _cell(value: float) -> str:
    """Whole numbers without a point, others with every digit (repr), so that reading gives the same number back."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))
