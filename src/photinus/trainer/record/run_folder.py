"""The folder of a run on disk: checkpoints, numbers, config, picture and how the run ended. Rank 0's affair.

Beside the files of `photinus.runlog` there are checkpoints/ and, in their cases, tensorboard/, curves.png, earlier-1/
(what lay here before a run that began anew) and .run.lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ... import env
from ...errors import CollectiveError, PhotinusError
from ...parallel.exchange.agreement import gather_per_rank
from ...runlog.events import EVENTS, append_event, read_events, this_process
from ...runlog.files import plain_file
from ...runlog.run import CONFIG, FILES, Run
from ...runlog.tables import METRICS, RANKS, Row, RunFiles, StepLoss, Window, drop_windows_after
from ..checkpoint.durable import lock_file
from ..checkpoint.folder import CHECKPOINTS, CheckpointFolder
from ..checkpoint.position import Position
from ..session.preemption import Suspended
from .config import save_config
from .tensorboard import TensorBoard

PICTURE = "curves.png"
_LOCK = ".run.lock"
# The worker of an attempt before this one may still be dying on a host that was cut off.
_AFTER_A_RESTART_S = 10.0


class RunFolder:
    """Writes what a run leaves."""

    def __init__(self, path: Path, *, keep_last: int, best: str | None, tensorboard: bool) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.error: Exception | None = None  # the first in writing numbers, for all ranks to raise together
        self._best = None if best is None else best.removeprefix("-")
        self._wants_tensorboard = tensorboard
        self._tensorboard: TensorBoard | None = None
        self.files = RunFiles(path)
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
        self.files.go_on_from(step, position.history)
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
            self.files.append_losses(losses, start)
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
            self.files.write_metrics(history)
            if self._tensorboard is not None:
                self._tensorboard.add_row(row)
        self.tell(kind, int(row["step"]), epoch=int(row["epoch"]), validation_s=round(aside_s, 6))

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
            self.files.make_durable()
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

    def describe(self) -> str:
        """Where the results lie, in a line."""
        names = (self.files.metrics.name, self.files.losses.name, PICTURE, CONFIG)
        present = [name for name in names if (self.path / name).exists()]
        return f"results in {self.path}: {', '.join([*present, CHECKPOINTS + '/'])}"


def draw_curves(folder: Path) -> Path | None:
    """Draws a run: training loss, what was logged, and the speed, over the steps; a dotted line marks each restart.

    Losses that were logged (names with "loss" in them) share the first panel. Of very many steps the line is a mean,
    with a band from the lowest to the highest.

    Args:
        folder: the run's, with losses.csv and metrics.csv; there the picture is written, atomically.

    Returns:
        The picture's path; None, with a warning, when matplotlib is not installed or there is nothing to draw.
    """
    run = Run(folder)
    run.refresh()
    if not run.epochs:
        warnings.warn(f"no curves were drawn: {folder / METRICS} holds no finished epoch", stacklevel=2)
        return None
    try:
        import matplotlib  # noqa: F401 - asked for by name, for the next line is silent when it has run before

        from ...runlog import chart, figures
    except ImportError as error:
        warnings.warn(
            f"curves.png was not drawn, since matplotlib cannot be imported ({error}); `pip install matplotlib`, and "
            f"start the script again: it draws what is missing. The numbers are in {folder / METRICS}",
            stacklevel=2,
        )
        return None
    figure = chart.picture(figures.curves([run], [run.name]), _title(run))
    picture = folder / PICTURE
    new = picture.with_name(f".{picture.name}.{os.getpid()}.new")
    try:
        figure.savefig(new, dpi=144, format="png")
        os.replace(new, picture)
    finally:
        new.unlink(missing_ok=True)
    return picture


def _title(run: Run) -> str:
    last = run.epochs[-1]
    parts = [f"{run.name}: {int(last['epoch'])} epochs, {int(last['step'])} steps, {last.get('elapsed_s', 0.0):.1f} s"]
    names = [name for name in run.logged if "loss" not in name] or run.logged
    parts += [f"{name.replace('_', ' ')} {last[name]:.4g}" for name in names[:2] if name in last]
    return " · ".join(parts)


class Ending:
    """Tells once. Called with the error that ended the session, or None. Holds no model, so the session may keep it.

    Rank 0 tells every end. Another rank tells an error of its own, where the run's folder is on a disk that it sees:
    rank 0 may be killed before it has learned of it.
    """

    def __init__(self, folder: Path, rank: int, position: Position) -> None:
        self._folder, self._rank, self._position = folder, rank, position
        self.told = False

    def __call__(self, error: BaseException | None) -> None:
        """The session ends, by this error or well. A disk that takes no more is no reason to hide the error."""
        if self.told:
            return
        with contextlib.suppress(OSError, PhotinusError):
            if error is None or (isinstance(error, SystemExit) and not error.code):
                self.end("left")
            elif isinstance(error, Suspended):
                self.end("suspended", str(error))
            elif isinstance(error, KeyboardInterrupt):
                self.end("left", "Ctrl-C")
            else:
                self._fail(error)

    def end(self, how: str, why: str = "") -> None:
        """The run is over: "finished", "stopped" early on request, "suspended", or "left" by its script before its end.

        Raises:
            OSError: it could not be written.
        """
        self.told = True
        if self._rank == 0:
            facts = {"how": how, "epochs": self._position.epochs_done, **({"text": why} if why else {})}
            append_event(self._folder, "end", self._position.step, **facts)

    def _fail(self, error: BaseException) -> None:
        self.told = True
        consequence = isinstance(error, CollectiveError)  # of what another rank did
        if self._rank != 0 and (consequence or not (self._folder / EVENTS).exists()):
            return
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        append_event(self._folder, "error", self._position.step, rank=self._rank, text=text, consequence=consequence)


_held: dict[Path, RunLock] = {}  # by this process; record locks know processes, so it cannot lock itself out


def ranks_without(folder: Path, lock: RunLock | None) -> list[int]:
    """The ranks that do not see rank 0's folder of the run, by its lock (None on other ranks). Called by all ranks."""
    owner = "" if lock is None else lock.owner
    with contextlib.suppress(OSError, PhotinusError):
        if lock is None:  # rank 0 would let go of it
            with open(folder / _LOCK, encoding="utf-8", errors="replace", opener=plain_file) as file:
                owner = file.read(200)
    owners = gather_per_rank(owner)
    return [rank for rank, seen in enumerate(owners) if seen != owners[0]]


class RunLock:
    """Keeps a second job out of a run's folder, made if it is not there, until `close`: their checkpoints would mix.

    A POSIX record lock on a file in the folder, held by rank 0. The kernel lets go of it when the process ends, however
    that happens, and children that were forked meanwhile (a data loader's workers) do not keep it, as they would keep
    flock's. Between hosts it holds where the shared file system passes locks on: NFS does (a host that dies keeps its
    lock until the server's lease is over, 90 s as a rule), Lustre when mounted with `flock`. Where there are no locks,
    a warning says so. In one process, a later lock takes over.

    Raises:
        PhotinusError: another process holds it; says which, on which host.
        OSError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder.resolve() / _LOCK
        self.owner = f"pid {os.getpid()} on host {socket.gethostname()}"
        self._descriptor = self._taken_over()
        if self._descriptor is None:
            self._descriptor = plain_file(self._path, os.O_RDWR | os.O_CREAT)
            patience_s = _AFTER_A_RESTART_S if env.ATTEMPT.get() > 0 else 0.0
            try:
                lacking = lock_file(self._descriptor, fcntl.lockf, self.owner, patience_s, self._refusal)
                os.fsync(self._descriptor)  # for ranks on other hosts, see `ranks_without`
            except BaseException:
                self.close()
                raise
            if lacking:
                text = f"{self._path.parent} has no locks ({lacking}): nothing keeps a second job out of it"
                warnings.warn(text, stacklevel=3)
        _held[self._path] = self

    def close(self) -> None:
        """Lets go of the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.pop(self._path, None)

    def _taken_over(self) -> int | None:
        """The descriptor of this process's lock on the folder. (Closing any other one would end that lock.)"""
        before = _held.get(self._path)
        if before is None or before._descriptor is None or not self._path.exists():
            return None
        if not os.path.samestat(os.fstat(before._descriptor), self._path.stat()):  # of a folder that was removed
            return None
        descriptor, before._descriptor = before._descriptor, None
        return descriptor

    def _refusal(self, holder: str) -> PhotinusError:
        return PhotinusError(
            f"{self._path.parent} belongs to a job that is running: rank 0 is {holder}. Two jobs would overwrite each "
            f"other's checkpoints. Give this one another folder (out=...), or end that one first."
        )
