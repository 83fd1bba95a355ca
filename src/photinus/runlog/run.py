"""A run as its folder shows it, read once or again and again while it is written; and how to find a run's folder."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UsageError
from ..words import closest
from .curve import Curve
from .events import EVENTS, Event, cause_of, is_alive, read_event
from .files import Tail, plain_file
from .tables import LOSSES, METRICS, OWN_COLUMNS, RANKS, Row, Window, read_window

CONFIG = "config.json"
FORMAT = 2
"""Of config.json. Files of format 1 count batches as steps, and are shown so."""
FILES = (CONFIG, LOSSES, METRICS, RANKS, EVENTS)

_Kind = TypeVar("_Kind", list[Any], dict[str, Any])
_MOST = 2**53  # steps and epochs; what is larger was never counted
_QUIET_S = 60.0  # a run of another host that writes nothing for this time is silent


@dataclass(frozen=True)
class State:
    """The state of a run: running or ended.

    Attributes:
        word: "running", "finished", "stopped" (early, on request), "left" (the script left the loop), "failed" (a rank
            raised), "died" (its process is gone and recorded no end), "silent" (on another host, which has written
            nothing for long) or "empty" (not begun).
        why: the reason, or "".
    """

    word: str
    why: str = ""


class Run:
    """The content of a run's folder.

    Args:
        points: number of bins of a curve.

    Attributes:
        folder: the argument.
        config: content of config.json; {} without one.
        losses: curve of the loss of each step.
        last_loss, last_step, last_epoch: of the last step whose loss is known; NaN and 0 before there is one.
        epochs: rows of metrics.csv, one per epoch.
        windows: lines of ranks.jsonl, the newest last.
        events: lines of events.jsonl, the newest last.
        damaged: number of lines that could not be read.
    """

    def __init__(self, folder: Path, *, points: int = 400) -> None:
        self.folder = folder
        self.config: dict[str, Any] = {}
        self.epochs: list[Row] = []
        self.windows: list[Window] = []
        self.events: list[Event] = []
        self.damaged = 0
        self._points = points
        self._tails = {name: Tail(folder / name) for name in (LOSSES, RANKS, EVENTS)}
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._columns: list[str] = []
        self._forget_losses()

    def _forget_losses(self) -> None:
        self.losses = Curve(self._points)
        self.last_loss, self.last_step, self.last_epoch = math.nan, 0, 0
        self.not_finite: deque[int] = deque(maxlen=50)  # steps whose loss was NaN or infinite, the last of them
        self._columns = []

    def refresh(self) -> None:
        """Read what was written since the last call."""
        if self._change_times(CONFIG):
            self.config = self._read_config()
        self._read_losses()
        self._extend(self.windows, RANKS, read_window)
        self._extend(self.events, EVENTS, read_event)
        if self._change_times(METRICS):
            self.epochs = self._read_epochs()

    def _extend(self, items: list[Any], name: str, read: Callable[[str], Any]) -> None:
        is_restarted, lines = self._tails[name].read()
        if is_restarted:
            items.clear()
        found = [read(line) for line in lines]
        good = [each for each in found if each is not None]
        self.damaged += len(found) - len(good)
        items.extend(good)

    def _read_losses(self) -> None:
        is_restarted, lines = self._tails[LOSSES].read()
        if is_restarted:
            self._forget_losses()
        for line in lines:
            cells = line.split(",")
            if not self._columns:
                self._columns = cells
                continue
            if cells == self._columns:
                continue
            try:
                row = dict(zip(self._columns, cells, strict=True))
                step, epoch, loss = int(row["step"]), int(row["epoch"]), _drawable(float(row["loss"]))
            except (ValueError, KeyError):
                step = epoch = -1
            if not (0 <= step < _MOST and 0 <= epoch < _MOST):
                self.damaged += 1
                continue
            self.losses.add(step, loss)
            self.last_loss, self.last_step, self.last_epoch = loss, step, epoch
            if not math.isfinite(loss):
                self.not_finite.append(step)

    def _change_times(self, name: str) -> bool:
        now = (0, 0, 0)
        with contextlib.suppress(OSError):
            status = os.stat(self.folder / name)
            now = (status.st_ino, status.st_size, status.st_mtime_ns)
        before, self._stamps[name] = self._stamps.get(name, (0, 0, 0)), now
        return now != before

    def _read_epochs(self) -> list[Row]:
        _, lines = Tail(self.folder / METRICS).read()
        rows, names, found = [], [], []
        with contextlib.suppress(csv.Error):
            names, *found = csv.reader(f"{line}\n" for line in lines or [""])  # a name may hold a comma or a line's end
        for cells in found:
            try:
                rows.append({name: _drawable(float(cell)) for name, cell in zip(names, cells, strict=True) if cell})
            except ValueError:
                self.damaged += 1
        return [row for row in rows if all(0 <= row.get(name, math.nan) < _MOST for name in ("epoch", "step"))]

    def _read_config(self) -> dict[str, Any]:
        try:
            with open(self.folder / CONFIG, encoding="utf-8", opener=plain_file) as file:
                return _typed(json.load(file), dict)
        except (OSError, ValueError, RecursionError):
            return {}

    # -- what follows from it ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the folder, with backslashes in place of bytes that are not UTF-8."""
        return self.folder.resolve().name.encode(errors="backslashreplace").decode()

    @property
    def starts(self) -> list[Event]:
        """Every start of the run, the newest last."""
        return [event for event in self.events if event.kind == "start"]

    @property
    def config_starts(self) -> list[dict[str, Any]]:
        """Every start of the run as config.json describes it, the newest last."""
        return [start for start in _typed(self.config.get("starts"), list) if isinstance(start, dict)]

    @property
    def option(self) -> dict[str, Any]:
        """The options of the run, from config.json."""
        return _typed(self.config.get("options"), dict)

    @property
    def hosts(self) -> list[str]:
        """Each rank's host at the newest start; [] when it is not known."""
        sources = [*(event.facts for event in reversed(self.starts)), *reversed(self.config_starts)]
        return [*map(str, next(filter(None, (_typed(source.get("hosts"), list) for source in sources)), []))]

    @property
    def pids(self) -> list[Any]:
        """Each rank's process at the newest start; [] when it is not known."""
        return _typed(self._of_start("pids"), list)

    @property
    def world_size(self) -> int:
        """Number of ranks at the newest start; 0 when it is not known."""
        if self.windows and (not self.starts or self.windows[-1].time_s >= self.starts[-1].time_s):
            return self.windows[-1].world_size
        return len(self.hosts)

    @property
    def epochs_wanted(self) -> int:
        """Number of epochs after which the run ends; 0 if it is not known."""
        return _whole(self._of_start("epochs")) or _whole(self.option.get("epochs"))

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps per epoch; 0 if it is not known."""
        count = _whole(self._of_start("steps_per_epoch"))
        if count or not self.epochs:
            return count
        return round(self.epochs[0]["step"] / max(1.0, self.epochs[0]["epoch"]))

    @property
    def steps_wanted(self) -> int:
        """Number of steps after which the run ends; 0 if it is not known."""
        return _whole(self._of_start("steps")) or self.epochs_wanted * self.steps_per_epoch

    @property
    def step(self) -> int:
        """Return the number of steps that are known to be done."""
        rows = [int(row["step"]) for row in self.epochs[-1:]]
        return max(self.last_step, *(window.step for window in self.windows[-1:]), *rows, 0)

    @property
    def epoch(self) -> int:
        """The epoch of the last step known, from 1; 0 before the first."""
        rows = [int(row["epoch"]) for row in self.epochs[-1:]]
        return max(self.last_epoch, *(window.epoch for window in self.windows[-1:]), *rows, 0)

    @property
    def newest_windows(self) -> list[Window]:
        """All windows of the newest start."""
        return [window for window in self.windows if window.start == self.windows[-1].start]

    @property
    def logged(self) -> list[str]:
        """Names of the values that the user logged, in the order in which they first appear."""
        return [name for name in dict.fromkeys(name for row in self.epochs for name in row) if name not in OWN_COLUMNS]

    @property
    def restarts(self) -> int:
        """Return the number of restarts after the first start."""
        return max(1, len(self.starts), len(self.config_starts)) - 1

    def silent_s(self, now_s: float) -> float:
        """Seconds since the run last wrote anything; infinite when it never did."""
        return max(0.0, now_s - written_at_s(self.folder))

    def state(self, now_s: float | None = None) -> State:
        """Return the state of the run, from its last events, and from rank 0's process if it is on this host."""
        now_s = time.time() if now_s is None else now_s
        last_start = next((i for i in reversed(range(len(self.events))) if self.events[i].kind == "start"), None)
        if last_start is None:
            return State("silent" if self.step else "empty")
        since = self.events[last_start + 1 :]
        errors = [event for event in since if event.kind == "error"]
        if errors:  # the first that another rank's does not explain
            cause = next((event for event in errors if not event.facts.get("consequence")), errors[0])
            return State("failed", cause_of(cause))
        ends = [event for event in since if event.kind == "end"]
        if ends:
            how = str(ends[-1].facts.get("how", "finished"))
            return State(how if how in ("finished", "stopped", "left") else "left")
        silent_s = self.silent_s(now_s)
        alive = is_alive(self.events[last_start].facts)
        if alive is None:
            pause_s = max(_QUIET_S, 4 * self._usual_pause_s())
            return State("running") if silent_s < pause_s else State("silent")
        return State("running") if alive else State("died")

    def _usual_pause_s(self) -> float:
        times = [window.time_s for window in self.windows[-6:]]
        return max((later - sooner for sooner, later in itertools.pairwise(times)), default=0.0)

    def _of_start(self, name: str) -> Any:
        return self.starts[-1].facts.get(name) if self.starts else None


def is_run(folder: Path) -> bool:
    """Return whether a folder belongs to a run: it holds events, or a config with losses."""
    is_there = os.path.lexists  # not Path's, which raises where the folder is another user's
    return is_there(folder / EVENTS) or (is_there(folder / CONFIG) and is_there(folder / LOSSES))


def written_at_s(folder: Path) -> float:
    """When a run last wrote anything, Unix time; minus infinity when it never did."""
    times = [-math.inf]
    for name in FILES:
        with contextlib.suppress(OSError):
            times.append(os.stat(folder / name).st_mtime)
    return max(times)


def _typed(value: object, kind: type[_Kind]) -> _Kind:
    """Return the value if it is of this kind, else an empty one: anybody may have edited a file."""
    return value if isinstance(value, kind) else kind()


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MOST else 0


def _drawable(value: float) -> float:
    """Return the value, or infinity or 0 if it is too large or too small for an axis."""
    return value * math.inf if abs(value) > 1e100 else value if abs(value) > 1e-100 else 0.0 * value


DEPTH = 4
_MOST_FOLDERS = 20_000
_WITHOUT_RUNS = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})


def find_runs(below: Path) -> Iterator[Path]:
    """Yield the folders of runs in a folder, itself included, down to DEPTH folders below it.

    Folders inside a run's folder (checkpoints, earlier runs moved aside), hidden folders and links are skipped. The
    search ends after 20,000 folders.
    """
    for folder, inside, _ in itertools.islice(os.walk(below), _MOST_FOLDERS):
        is_one = is_run(Path(folder))
        if is_one:
            yield Path(folder)
        is_deep = len(Path(folder).relative_to(below).parts) == DEPTH
        inside[:] = [] if is_one or is_deep else [n for n in inside if n[0] != "." and n not in _WITHOUT_RUNS]


def newest_run(below: Path) -> Path | None:
    """The run in a folder whose files changed last; None when there is no run."""
    return max(find_runs(below), key=written_at_s, default=None)


def run_folder(command: str, argument: str | None) -> Path:
    """Return the folder of the run that an argument of a command names. Raise UsageError if there is none.

    Args:
        command: for messages, like "top".
        argument: a run's folder, or a file or the checkpoints in it; or a folder with runs: the newest is returned.
            None: the working directory.
    """
    below = Path(os.path.expanduser("." if argument is None else argument))
    if argument is not None:
        if not below.exists():
            raise UsageError(f"photinus {command} {argument}: there is no such folder.{_hint(below)}")
        if below.is_file():
            below = below.parent
        if is_run(below):
            return below
        if below.name == "checkpoints" and is_run(below.parent):
            return below.parent
    found = newest_run(below)
    if found is not None:
        return found
    where = "here" if argument is None else f"in {argument}"
    raise UsageError(
        f"photinus {command}: there is no run {where} ({below.resolve()}, and down to {DEPTH} folders below it). A "
        f"run's folder is what the script gives as out=..., with {FILES[-1]} in it: photinus {command} FOLDER."
    )


def _hint(path: Path) -> str:
    folder = path.parent
    near = closest(path.name, [each.name for each in folder.iterdir() if each.is_dir()]) if folder.is_dir() else None
    return f" Did you mean {folder / near}?" if near else ""
