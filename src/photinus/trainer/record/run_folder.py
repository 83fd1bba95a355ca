"""The folder of a run on disk: checkpoints, numbers, config and picture. Rank 0's affair.

Beside the files of `photinus.runlog` there are checkpoints/ and, in their cases, tensorboard/, curves.png, earlier-1/
(what lay here before a run that began anew) and .run.lock.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import PhotinusError
from ...runlog.events import append_event, read_events
from ...runlog.plain_file import plain_file
from ...runlog.process import this_process
from ...runlog.run import CONFIG, FILES
from ...runlog.tables import Row, RunFiles, StepLoss
from ...runlog.windows import RANKS, Window, drop_windows_after
from ..checkpoint.folder import CHECKPOINTS, CheckpointFolder
from ..checkpoint.position import Position
from .config import save_config
from .curves import PICTURE, draw_curves
from .tensorboard import TensorBoard


class RunFolder:
    """Writes what a run leaves."""

    def __init__(self, path: Path, *, keep_last: int, best: str | None, tensorboard: bool) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.error: Exception | None = None  # the first in writing numbers, for all ranks to raise together
        self._best = None if best is None else best.removeprefix("-")
        self._wants_tensorboard = tensorboard
        self._tensorboard: TensorBoard | None = None
        self._files = RunFiles(path)
        self._checkpoints = CheckpointFolder(
            path / CHECKPOINTS,
            keep_last=keep_last,
            keep_best=1 if best else 0,
            best_is="lowest" if best and best.startswith("-") else "highest",
            metric_name=self._best,
        )
        self._checkpoints.remove_debris()  # of a start that was killed while it wrote
        for name in (*FILES, PICTURE):
            for unfinished in path.glob(f".{name}.*.new"):
                unfinished.unlink(missing_ok=True)

    def begin(
        self,
        position: Position,
        options: Mapping[str, Any],
        user: Mapping[str, Any],
        start: Mapping[str, Any],
        length: Mapping[str, int],
        *,
        goes_on: bool,
    ) -> None:
        """Drops the numbers after the position, and records this start: in config.json, and as an event.

        Args:
            position: where the run begins or goes on.
            options, user, start: for config.json, see `save_config`.
            length: of the run, for the event: epochs, steps, steps_per_epoch, batch_size.
            goes_on: whether the files in the folder are of the same run.

        Raises:
            OSError: something could not be written.
        """
        step, world_size = position.step, start["world_size"]
        self._files.go_on_from(step, position.history)
        drop_windows_after(self.path, step)
        save_config(self.path, options, user, start, go_on=goes_on)
        if self._wants_tensorboard:
            self._tensorboard = TensorBoard(self.path, step, {**options, **user})
        starts = [event for event in read_events(self.path) if event.kind == "start"]
        before = starts[-1].facts.get("world_size") if starts else None
        if step and before is not None and before != world_size:
            append_event(self.path, "world_size", step, before=before, now=world_size)
        place = {name: start[name] for name in ("launcher", "attempt", "hosts", "backend", "device")}
        facts = {"start": position.start, "resumed_from": start["resumed_from"], **length, **place, **this_process()}
        append_event(self.path, "start", step, world_size=world_size, **facts)

    def append_losses(self, losses: Sequence[StepLoss], start: int) -> None:
        """Adds rows to losses.csv. An error is kept in `error`."""
        with self._keeping_error():
            self._files.append_losses(losses, start)
            if self._tensorboard is not None:
                self._tensorboard.add_losses(losses)

    def append_window(self, window: Window) -> None:
        """Adds a line to ranks.jsonl. An error is kept in `error`."""
        with self._keeping_error():
            with open(self.path / RANKS, "a", encoding="utf-8", opener=plain_file) as file:
                file.write(window.to_line())
            if self._tensorboard is not None:
                self._tensorboard.add_window(window)

    def end_row(self, kind: str, history: Sequence[Row], aside_s: float) -> None:
        """Writes metrics.csv, and an event of this kind; `aside_s` went into validation. An error is kept."""
        row = history[-1]
        with self._keeping_error():
            self._files.write_metrics(history)
            if self._tensorboard is not None:
                self._tensorboard.add_row(row)
        self.tell(kind, int(row["step"]), epoch=int(row["epoch"]), validation_s=round(aside_s, 6))

    def write_rows(self, history: Sequence[Row]) -> None:
        """Writes metrics.csv again, after the end. Raises OSError."""
        self._files.write_metrics(history)

    def tell(self, kind: str, step: int, **facts: Any) -> None:
        """Adds an event that happens now. An error is kept in `error`."""
        with self._keeping_error():
            append_event(self.path, kind, step, **facts)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, PhotinusError) as error:
            if isinstance(error, OSError) and error.filename is None:  # a write on a full disk does not say where
                error.filename = str(self.path)
            self.error = self.error or error

    def save(self, step: int, content: Mapping[str, Any], description: Mapping[str, Any], row: Row | None) -> Path:
        """Saves a checkpoint, after the numbers up to it are durable; returns its path.

        `row` is the row of metrics.csv that it ends, if it ends one; all else is as for CheckpointFolder.save.

        Raises:
            OSError: an earlier one in writing numbers.
            ValueError: `best` names what the row has not; the checkpoint is written all the same.
            CheckpointError: see CheckpointFolder.save.
        """
        with self._keeping_error():
            self._files.make_durable()
            if self._tensorboard is not None:
                self._tensorboard.flush()
        if self.error is not None:
            raise self.error
        metric = None if self._best is None or row is None else row.get(self._best)
        began = time.perf_counter()
        path = self._checkpoints.save(step, content, description=description, metric=metric)
        self.tell("checkpoint", step, name=path.name, seconds=round(time.perf_counter() - began, 6))
        if self._best is not None and row is not None and self._best not in row:
            raise ValueError(
                f"best={self._best!r}: nothing of that name was logged; there is {', '.join(sorted(row))}. What was "
                f"trained is saved in {path}: set it right, and start again."
            )
        return path

    def close(self) -> None:
        """Nothing more comes."""
        if self._tensorboard is not None:
            self._tensorboard.close()

    def draw(self) -> None:
        """Draws curves.png. What goes wrong is a warning: the training is done and saved."""
        try:
            draw_curves(self.path)
        except Exception as error:  # noqa: BLE001 - told, and no reason to fail a run that is done
            warnings.warn(f"{PICTURE} was not drawn: {type(error).__name__}: {error}", stacklevel=2)

    def has_picture(self) -> bool:
        """Whether curves.png is there."""
        return (self.path / PICTURE).exists()

    def describe(self) -> str:
        """Where the results lie, in a line."""
        names = (self._files.metrics.name, self._files.losses.name, PICTURE, CONFIG)
        present = [name for name in names if (self.path / name).exists()]
        return f"results in {self.path}: {', '.join([*present, CHECKPOINTS + '/'])}"
