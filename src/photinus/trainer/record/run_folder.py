"""The folder of a run: its options, numbers and events, its loggers, and how it ended. Rank 0 writes it.

Beside the files of `photinus.runlog` there are checkpoints/ and, in their cases, the loggers' folders, curves.png,
earlier-1/ (the files of the run before, when a run started over) and .run.lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ... import env
from ...errors import CollectiveError, HostError, PhotinusError
from ...job import status
from ...job.world import name_ranks
from ...parallel.exchange.agreement import JSON, from_rank_0, gather_per_rank
from ...runlog.digests import DIGESTS, DigestFile
from ...runlog.events import EVENTS, append_event, read_events, this_process
from ...runlog.files import plain_file
from ...runlog.run import CONFIG, FILES
from ...runlog.tables import LOSSES, METRICS, Row, RunFiles, StepLoss, Window, drop_windows_after
from ...words import mask
from ..checkpoint.durable import explain_no_space, lock_file, require_space
from ..checkpoint.folder import CHECKPOINTS, CheckpointFolder
from ..checkpoint.position import Position
from ..session.preemption import Suspended
from ..session.progress import say
from ..session.replicas import plain
from ..session.session import Session
from .config import describe_start, save_config, set_damaged_config_aside, user_options
from .curves import PICTURE, draw_curves
from .loggers import Loggers
from .resume import ResumePoint, describe_launch, folder_of_this_job
from .spec import Reporting, RunSpec


class RunFolder:
    """A run's folder as its loop sees it. All ranks call its methods; rank 0 alone writes. Without `out` nobody does.

    Args:
        out: the folder that the user gave; the run may be found elsewhere (see `folder_of_this_job`).
        least_bytes: of a checkpoint.

    Attributes:
        path: the run's folder, None without one.
        run: what the launcher calls the run (see `status`); "" without a folder.
        error: the first in writing numbers, for all ranks to raise together.
    """

    _begun = 0  # runs with a folder, in this process

    def __init__(
        self,
        session: Session,
        out: str | os.PathLike[str] | None,
        resume: str | os.PathLike[str] | None,
        spec: RunSpec,
        reporting: Reporting,
        least_bytes: int,
        parameters: Sequence[str],
    ) -> None:
        self.path: Path | None = None
        self.run = ""
        self.error: Exception | None = None
        self._session, self._spec, self._reporting = session, spec, reporting
        self._user = user_options(reporting.config)  # as they are now: the script may change them later
        self._least_bytes, self._parameters = least_bytes, parameters
        self._digests: DigestFile | None = None  # on rank 0
        self._writers: list[Any] = []  # RunFiles, then Loggers; on rank 0, from `begin` on
        self._loggers = Loggers((), say)
        self._lock: RunLock | None = None  # on rank 0
        self._position: Position | None = None  # of a run whose end is not recorded yet
        self._moved: str | None = None  # a note, where the run is not in the folder that the user gave
        self._options: dict[str, JSON] = {**spec.to_dict(), "resume": None if resume is None else str(resume)}
        if out is not None:
            options = {**self._options, "out": str(out)}
            find = partial(folder_of_this_job, Path(out), options, RunFolder._begun)
            folder, self._moved = from_rank_0(find, f"looking for the folder of {out}")
            self._options["out"], self.path = folder, Path(folder)
            self.run = f"{RunFolder._begun}:{self.path}"
            RunFolder._begun += 1

    def lock(self) -> None:
        """On rank 0: keep other jobs out.

        Raises:
            PhotinusError: another job holds the folder.
            HostError: it cannot be written.
        """
        if self.path is None:
            return
        try:
            with explain_no_space(self.path, self._least_bytes):
                self._lock = lock = RunLock(self.path)
        except OSError as error:
            text = f"rank 0 cannot write into {self.path} on host {self._session.host}: {error}. Give a folder"
            raise HostError(f"{text} that it can write (out=...), or change the permissions") from error
        self._session.at_end(lambda _: lock.close())
        if damage := set_damaged_config_aside(self.path):
            say(f"warning: {damage}")

    def begin(
        self, position: Position, length: Mapping[str, int | None], resumed_from: Path | None, point: ResumePoint
    ) -> None:
        """The run begins, or goes on, at this position: makes its folder ready, where there is something left to do.

        Args:
            length: of the whole run, for the event: epochs, steps, steps_per_epoch, batch_size.
            point: what rank 0 chose.
        """
        is_done, unseen = self._spec.length.reached(position), None
        if self.path is not None:
            prepare = partial(self._prepare, position, length, resumed_from, is_done=is_done, goes_on=point.goes_on)
            prepare = explain_no_space(self.path, self._least_bytes)(prepare)
            from_rank_0(prepare, f"preparing the folder {self.path}", is_long=True)  # a logger may log in
            if lacking := ranks_without(self.path, self._lock):
                where = f"on host {self._session.host}, and {name_ranks(lacking, 8)} cannot see it"
                unseen = f"note: {self.path} is {where}: rank 0's counts, from which the others get their state"
            if not is_done:
                status.update(out=self.run)
                self._position = position
                self._session.at_end(self.record_end)
        if self._session.is_main:
            for note in filter(None, (self._moved, point.note, unseen)):
                say(note)

    def _prepare(
        self, position: Position, length: Mapping[str, int | None], source: Path | None, *, is_done: bool, goes_on: bool
    ) -> None:
        """Drops the numbers after the position, and records this start: in config.json, and as an event."""
        path = self._folder
        path.mkdir(parents=True, exist_ok=True)
        files = RunFiles(path)
        self._writers.append(files)
        CheckpointFolder(path / CHECKPOINTS).remove_debris()  # of a start that was killed while it wrote
        for name in (*FILES, DIGESTS, PICTURE):
            for unfinished in path.glob(f".{name}.*.new"):
                unfinished.unlink(missing_ok=True)
        if is_done:  # nothing will be added
            self._let_go()
            return
        require_space(path, self._least_bytes)
        step = position.step
        resumed_from = None if source is None else str(source)
        start = describe_start(self._session, resumed_from=resumed_from, resumed_step=step, launch=describe_launch())
        damage = files.go_on_from(step, position.history)
        if damage:
            self._warn(position, damage)
        drop_windows_after(path, step)
        self._digests = DigestFile(path, self._parameters, step)
        save_config(path, self._options, self._user, start, go_on=goes_on)
        starts = [event for event in read_events(path) if event.kind == "start"]
        before, now = starts[-1].facts.get("world_size") if starts else None, start["world_size"]
        if step and before is not None and before != now:
            append_event(path, "world_size", step, before=before, now=now)
        place = {name: start[name] for name in ("launcher", "attempt", "hosts", "backend", "device")}
        facts = {"start": position.start, "resumed_from": resumed_from, **length, **place, **this_process()}
        append_event(path, "start", step, world_size=now, pids=list(self._session.pids), **facts)
        self._loggers = Loggers(self._reporting.loggers, partial(self._warn, position))
        self._writers.append(self._loggers)
        config = {**plain(self._user, str), **plain(self._options, str), "resumed_step": step, "world_size": now}
        self._loggers.start(mask(config))

    def _warn(self, position: Position, text: str) -> None:
        say(f"warning: {text}")
        self.record_event("warning", position.step, text=text)

    def append_losses(self, losses: Sequence[StepLoss], start: int) -> None:
        """Adds rows to losses.csv. An error is kept in `error`, as by what follows."""
        with self._keeping_error():
            for writer in self._writers:
                writer.add_losses(losses, start)

    def append_digests(self, step: int, digests: Sequence[int]) -> None:
        """Adds a record to digests.bin."""
        with self._keeping_error():
            if self._digests is not None:
                self._digests.add(step, digests)

    def append_window(self, window: Window) -> None:
        """Adds a line to ranks.jsonl."""
        with self._keeping_error():
            for writer in self._writers:
                writer.add_window(window)

    def end_row(self, kind: str, history: Sequence[Row], aside_s: float) -> None:
        """Writes metrics.csv, and an event of this kind; `aside_s` went into validation."""
        with self._keeping_error():
            for writer in self._writers:
                writer.add_row(history)
        row = history[-1]
        self.record_event(kind, int(row["step"]), epoch=int(row["epoch"]), validation_s=round(aside_s, 6))

    def rewrite_metrics(self, history: Sequence[Row]) -> None:
        """Writes metrics.csv again: something was added to its last row. Raises OSError."""
        for writer in self._writers[:1]:  # loggers have ended
            writer.add_row(history)

    def record_event(self, kind: str, step: int, **facts: Any) -> None:
        """Adds an event that happens now."""
        with self._keeping_error():
            if self._writers:
                append_event(self._folder, kind, step, **facts)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, PhotinusError) as error:
            if isinstance(error, OSError) and error.filename is None:  # a write on a full disk does not say where
                error.filename = str(self.path)
            self.error = self.error or error

    def flush(self) -> None:
        """Bring all numbers to the disk. Raises the first error that there was in writing any."""
        with self._keeping_error():
            for writer in self._writers[:1]:  # no logger keeps a checkpoint back
                writer.flush()
        if self.error is not None:
            raise self.error

    def finish(self, how: str, text: str = "") -> None:
        """The run is over: "finished", or "stopped" early on request; the text says why. Raises OSError."""
        self._end(how, text)
        self.draw()
        self._loggers.end(how)
        self._let_go()
        status.update(out="")

    def record_end(self, error: BaseException | None) -> None:
        """Record that the run ends before it is done: by this error, or because its script ends.

        A disk that takes no more, or a closed output, is no reason to hide the error. A second call does nothing.
        """
        how, text = "error", ""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            how, error = "left", None
        elif isinstance(error, Suspended):
            how, text, error = "suspended", str(error), None
        elif isinstance(error, KeyboardInterrupt):
            how, text, error = "left", "Ctrl-C", None
        is_running = self._position is not None
        with contextlib.suppress(OSError, ValueError, PhotinusError):
            self._end(how, text, error)
            if is_running and text == "Ctrl-C":
                self._say_where_it_resumes()
        self._loggers.end(how)

    def _say_where_it_resumes(self) -> None:
        if not self._session.is_main or self._options["resume"] != "auto" or env.WORKER_FILES.get() is not None:
            return  # a launcher says it
        steps = [e.step for e in read_events(self._folder) if e.kind == "checkpoint" or e.facts.get("resumed_from")]
        if steps:
            say(f"photinus: {status.LAST_CHECKPOINT.format(steps[-1])}; {status.RESUMES}")

    def _end(self, how: str, text: str = "", error: BaseException | None = None) -> None:
        """Record once how the run ended: "finished", "stopped", "suspended", "left" by its script, or by an error.

        Rank 0 records every end. Another rank records an error of its own, if it sees the folder: rank 0 may be killed
        before it knows of that error.
        """
        position, self._position = self._position, None
        if position is None:
            return
        if error is None and self._session.is_main:
            facts = {"how": how, "epochs": position.epochs_done, **({"text": text} if text else {})}
            append_event(self._folder, "end", position.step, **facts)
        consequence = isinstance(error, CollectiveError)  # of what another rank did
        if error is not None and (self._session.is_main or (not consequence and (self._folder / EVENTS).exists())):
            lines = str(error).strip().splitlines()
            text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
            rank = self._session.rank
            append_event(self._folder, "error", position.step, rank=rank, text=text, consequence=consequence)

    def draw(self, *, if_missing: bool = False) -> None:
        """Draws curves.png where that is wanted. What goes wrong is a warning: the training is done and saved."""
        if not self._writers or not self._reporting.curves or (if_missing and (self._folder / PICTURE).exists()):
            return
        try:
            if picture := draw_curves(self._folder):
                self._loggers.call("picture", "curves", picture)
        except Exception as error:  # noqa: BLE001 - a warning, and no reason to fail a run that is done
            warnings.warn(f"{PICTURE} was not drawn: {type(error).__name__}: {error}", stacklevel=2)

    def describe(self) -> str:
        """Return the place of the results, in a line; "" on ranks that do not write."""
        if not self._writers:
            return ""
        names = (METRICS, LOSSES, PICTURE, CONFIG)
        present = [name for name in names if (self._folder / name).exists()]
        return f"results in {self._folder}: {', '.join([*present, CHECKPOINTS + '/'])}"

    @property
    def writes(self) -> bool:
        """Return whether this is the rank that writes, and `begin` made it ready."""
        return self._writers != []

    @property
    def _folder(self) -> Path:
        assert self.path is not None, "a run that writes has a folder"
        return self.path

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.close()


_LOCK = ".run.lock"
# The worker of an attempt before this one may still be dying on a host that was cut off.
_AFTER_A_RESTART_S = 10.0
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
