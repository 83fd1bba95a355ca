"""The numbers of a run: the loss of each step, a row per epoch, and the two CSV files that hold them.

A step's loss is the mean over the *global* batch. To know it costs an exchange between the ranks, so a few steps are
collected and exchanged at once (`StepLosses`). The files survive restarts (`RunFiles`): what a killed process wrote
after its last checkpoint is dropped when the run goes on, so no row comes twice and none is missing.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["RunFiles", "StepLoss", "StepLosses", "read_rows", "write_atomically"]

Row = dict[str, float]


@dataclass(frozen=True)
class StepLoss:
    """The loss of one step: its mean over the samples of the global batch, and how many those were."""

    step: int
    epoch: int
    loss: float
    samples: int


class StepLosses:
    """Collects this rank's losses and exchanges them a few steps at a time.

    The collected tensors stay on their device: nothing waits for the device until `exchange`.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, int, int, int]] = []  # step, epoch, local samples, global samples
        self._given: list[torch.Tensor | None] = []  # this rank's mean loss, None where none was given

    def __len__(self) -> int:
        return len(self._steps)

    def begin_step(self, step: int, epoch: int, samples: int, global_samples: int) -> None:
        """Opens the slot of a step, of which this rank has `samples` of `global_samples`."""
        self._steps.append((step, epoch, samples, global_samples))
        self._given.append(None)

    def add(self, loss: torch.Tensor) -> None:
        """Adds a loss (scalar, mean over this rank's samples) to the step begun last."""
        loss = loss.detach().float().reshape(())
        before = self._given[-1]
        self._given[-1] = loss if before is None else before + loss

    def drop_last(self) -> None:
        """Forgets the step begun last: its body did not finish."""
        del self._steps[-1:], self._given[-1:]

    def exchange(
        self, flags: Sequence[float], world_size: int, device: torch.device
    ) -> tuple[list[StepLoss], list[float]]:
        """The losses of the collected steps over all ranks, and the sums of the flags. Every rank must call it.

        One all-reduce of 2 * steps + len(flags) float64 values. Steps for which no rank gave a loss are left out.
        """
        # Stacked where they are, then one copy to the host.
        given = [loss for loss in self._given if loss is not None]
        means = iter(torch.stack(given).tolist() if given else [])
        sums, counts = [], []
        for loss, (_, _, samples, _) in zip(self._given, self._steps, strict=True):
            mean = 0.0 if loss is None else next(means)
            # Of no samples the mean is nan, and must count as nothing.
            sums.append(mean * samples if samples else 0.0)
            counts.append(0 if loss is None else samples)
        vector = [*sums, *counts, *flags]
        if world_size > 1 and vector:
            # On the host for backends of the host, on the device for nccl, which knows no other.
            tensor = torch.tensor(vector, dtype=torch.float64, device=device)
            dist.all_reduce(tensor)
            vector = tensor.tolist()
        n = len(self._steps)
        losses = [
            StepLoss(step, epoch, total / count, global_samples)
            for (step, epoch, _, global_samples), total, count in zip(
                self._steps, vector[:n], vector[n : 2 * n], strict=True
            )
            if count
        ]
        self._steps, self._given = [], []
        return losses, vector[2 * n :]


class RunFiles:
    """`losses.csv` (a row per step) and `metrics.csv` (a row per epoch) in the run's folder. For rank 0.

    losses.csv: step, epoch, loss, start. metrics.csv: epoch, step, loss, what the user logged, samples_per_s,
    elapsed_s, start. `start` counts the times that the run was started or resumed, from 1.
    """

    LOSS_COLUMNS = ("step", "epoch", "loss", "start")

    def __init__(self, folder: Path) -> None:
        self.losses = folder / "losses.csv"
        self.metrics = folder / "metrics.csv"

    def go_on_from(self, step: int, history: Sequence[Row]) -> None:
        """Drops all rows after `step`, and a line that a killed process wrote only half of."""
        kept = [row for row in read_rows(self.losses) if row["step"] <= step and set(row) == set(self.LOSS_COLUMNS)]
        write_atomically(self.losses, _table(self.LOSS_COLUMNS, kept))
        self.write_metrics(history)

    def append_losses(self, losses: Iterable[StepLoss], start: int) -> None:
        """Appends rows to losses.csv."""
        rows = [{"step": x.step, "epoch": x.epoch, "loss": x.loss, "start": start} for x in losses]
        with open(self.losses, "a", newline="", encoding="utf-8") as file:
            if file.tell() == 0:
                file.write(_table(self.LOSS_COLUMNS, []))
            file.write(_table(self.LOSS_COLUMNS, rows, header=False))

    def make_durable(self) -> None:
        """Makes the rows of losses.csv outlive a power cut; a checkpoint relies on those before it."""
        with open(self.losses, "a", encoding="utf-8") as file:
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
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    rows = []
    for row in csv.DictReader(io.StringIO(complete)):
        try:
            rows.append({name: float(cell) for name, cell in row.items() if cell})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: the line {dict(row)} holds no numbers; was the file edited?") from error
    return rows


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file so that a reader, or a process killed in between, finds the old or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(new, "w", newline="", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


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
