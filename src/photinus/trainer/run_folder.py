"""The folder of a run on disk: checkpoints, numbers, config and picture. Rank 0's affair.

out/
  checkpoints/    see checkpoint.py
  metrics.csv     a row per epoch
  losses.csv      a row per step
  config.json     options, versions, commit, world, each start
  curves.png      drawn at the end
  earlier-1/      what lay here before a run that began anew
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .checkpoint import CheckpointFolder
from .config import FILE_NAME, RunConfig
from .metrics import Row, RunFiles, StepLoss
from .resume import CHECKPOINTS

__all__ = ["RunFolder"]

_PICTURE = "curves.png"


class RunFolder:
    """Writes what a run leaves.

    Args:
        path: the folder; made when it is not there.
        keep_last: how many of the newest checkpoints stay.
        best: name of a metric; the checkpoint of the epoch where it was highest stays ("-" before the name: lowest).
    """

    def __init__(self, path: Path, *, keep_last: int, best: str | None) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.error: OSError | None = None  # the first in writing numbers, for all ranks to raise together
        self._best = None if best is None else best.removeprefix("-")
        self._files = RunFiles(path)
        self._checkpoints = CheckpointFolder(
            path / CHECKPOINTS,
            keep_last=keep_last,
            keep_best=1 if best else 0,
            best_is="lowest" if best and best.startswith("-") else "highest",
        )

    def begin(self, step: int, history: Sequence[Row], config: RunConfig, *, goes_on: bool) -> None:
        """Drops the numbers after `step`, and records this start in config.json."""
        self._files.go_on_from(step, history)
        config.save(self.path, go_on=goes_on)

    def append_losses(self, losses: Sequence[StepLoss], start: int) -> None:
        """Adds rows to losses.csv. An error is kept in `error`."""
        try:
            self._files.append_losses(losses, start)
        except OSError as error:
            self.error = self.error or error

    def write_metrics(self, history: Sequence[Row]) -> None:
        """Writes metrics.csv. An error is kept in `error`."""
        try:
            self._files.write_metrics(history)
        except OSError as error:
            self.error = self.error or error

    def save(
        self, step: int, content: Mapping[str, Any], description: Mapping[str, Any], epoch_row: Row | None
    ) -> Path:
        """Saves a checkpoint, after the numbers up to it are durable; returns its path.

        Args:
            step: of the run.
            content: by entry.
            description: what is in its manifest.
            epoch_row: the row of the epoch that it ends, None inside an epoch.

        Raises:
            OSError: an earlier one in writing numbers.
            ValueError: `best` names what the row has not.
            CheckpointError: see CheckpointFolder.save.
        """
        if self.error is not None:
            raise self.error
        metric = None
        if self._best is not None and epoch_row is not None:
            if self._best not in epoch_row:
                there = ", ".join(sorted(epoch_row))
                raise ValueError(f"best={self._best!r}: nothing of that name was logged; there is {there}")
            metric = epoch_row[self._best]
        self._files.make_durable()
        return self._checkpoints.save(step, content, description=description, metric=metric)

    def draw(self) -> None:
        """Draws curves.png. What goes wrong is a warning: the training is done and saved."""
        from .report import draw_curves

        try:
            draw_curves(self.path, self.path / _PICTURE)
        except Exception as error:  # noqa: BLE001 - told, and no reason to fail a run that is done
            warnings.warn(f"{_PICTURE} was not drawn: {type(error).__name__}: {error}", stacklevel=2)

    def has_picture(self) -> bool:
        """Whether curves.png is there."""
        return (self.path / _PICTURE).exists()

    def describe(self) -> str:
        """Where the results lie, in a line."""
        names = (self._files.metrics.name, self._files.losses.name, _PICTURE, FILE_NAME)
        present = [name for name in names if (self.path / name).exists()]
        return f"results in {self.path}: {', '.join([*present, CHECKPOINTS + '/'])}"
