"""The numbers of a run: `losses.csv`, a row per step; `metrics.csv`, a row per epoch or per validation; `ranks.jsonl`.

The files survive restarts: what a killed process wrote after its last checkpoint is dropped when the run goes on, so no
row comes twice and none is missing.

A line of `ranks.jsonl` says where the time of some consecutive steps went on every rank, and how much memory each rank
held. The phases of a step, which together are the whole step (validation and saving are no part of it):

| phase | what the thread that trains did |
|---|---|
| data | waited for the loader's next batch |
| forward | from the batch's arrival to the call of backward: forward and loss |
| backward | computed gradients |
| waiting | waited for other ranks, wherever in the step: communication that computation did not hide |
| optimizer | clipped and stepped |
| other | all else: the rest of the body, the loop's own work |
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import plain_file, set_damaged_aside, write_atomically
from .units import plural

LOSSES, METRICS = "losses.csv", "metrics.csv"
OWN_COLUMNS = frozenset({"epoch", "step", "loss", "learning_rate", "samples_per_s", "elapsed_s", "start"})
"""Columns of metrics.csv that a loop fills itself; all others are what the user logged."""
RANKS = "ranks.jsonl"
PHASES = ("data", "forward", "backward", "waiting", "optimizer", "other")
MEMORY = ("resident", "peak", "cuda", "cuda_peak")
_COUNTS = ("step", "epoch", "start", "steps", "samples")

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

    def go_on_from(self, step: int, history: Sequence[Row]) -> str:
        """Drop all rows after `step`, and a line that a killed process wrote only half of.

        Returns:
            Text of a warning that a file was damaged, or "". The damaged file is kept beside the new one.
        """
        unreadable: list[str] = []
        found = read_rows(self.losses, unreadable)
        rows = [row for row in found if set(row) == set(self.LOSS_COLUMNS)]
        bad, note = len(unreadable) + len(found) - len(rows), ""
        if unreadable:
            aside = set_damaged_aside(self.losses)
            note = f"{self.losses} is damaged: {plural(bad, 'line')} of it could not be read. The file is {aside} now"
        remaining = [row for row in rows if row["step"] <= step]
        write_atomically(self.losses, _table(self.LOSS_COLUMNS, remaining))
        self.add_row(history)
        return note

    def add_losses(self, losses: Iterable[StepLoss], start: int) -> None:
        """Appends rows to losses.csv."""
        rows = [{"step": x.step, "epoch": x.epoch, "loss": x.loss, "start": start} for x in losses]
        with open(self.losses, "a", newline="", encoding="utf-8", opener=plain_file) as file:
            if file.tell() == 0:
                file.write(_table(self.LOSS_COLUMNS, []))
            file.write(_table(self.LOSS_COLUMNS, rows, header=False))

    def add_window(self, window: Window) -> None:
        """Appends a line to ranks.jsonl."""
        with open(self.losses.with_name(RANKS), "a", encoding="utf-8", opener=plain_file) as file:
            file.write(window.to_line())

    def flush(self) -> None:
        """Makes the rows of losses.csv outlive a power cut; a checkpoint relies on those before it."""
        with open(self.losses, "a", encoding="utf-8", opener=plain_file) as file:
            os.fsync(file.fileno())

    def add_row(self, history: Sequence[Row]) -> None:
        """Write metrics.csv as a whole: it has one row per epoch, and columns may appear at any epoch."""
        last = ("samples_per_s", "elapsed_s", "start")
        names: dict[str, None] = {"epoch": None, "step": None, "loss": None}
        for row in history:
            names.update(dict.fromkeys(name for name in row if name not in last))
        write_atomically(self.metrics, _table((*names, *last), history))


def read_rows(path: Path, unreadable: list[str] | None = None) -> list[Row]:
    """The rows of one of a run's CSV files; empty cells are left out, a half-written last line too.

    A missing file has no rows.

    Args:
        unreadable: takes lines that hold something else than numbers, which are an error otherwise.

    Raises:
        ValueError: there is such a line.
    """
    try:
        with open(path, encoding="utf-8", errors="replace", opener=plain_file) as file:
            text = file.read()
    except FileNotFoundError:
        return []
    names, *lines = text[: text.rfind("\n") + 1].split("\n")
    rows = []
    for line in filter(None, lines):
        try:
            columns, cells = csv.reader([names, line])
            rows.append({name: float(cell) for name, cell in zip(columns, cells, strict=True) if cell})
        except (csv.Error, ValueError) as error:
            if unreadable is None:
                raise ValueError(f"{path}: the line {line[:80]!r} has no numbers. Was the file edited?") from error
            unreadable.append(line)
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


@dataclass(frozen=True)
class Window:
    """Some consecutive steps of all ranks.

    Attributes:
        time_s: when it was written, Unix time.
        step: the last of its steps, of the whole run.
        epoch: in which that was, from 1.
        start: which start of the run, from 1.
        steps: how many.
        samples: of all ranks, in all steps.
        phases: by phase, seconds of a step, the mean over the steps, by rank.
        memory: bytes by rank at the end: "resident" in physical memory, "peak" the most of that since the process
            began, "cuda" held by tensors on its GPU, "cuda_peak" the most of that; 0 where there is no GPU.
        links: by rank, of its links to other hosts: the rank at the other end of the slowest (-1: it has none), for how
            many seconds of a step bytes were under way on that one, and on the median one; () where nobody knows.
    """

    time_s: float
    step: int
    epoch: int
    start: int
    steps: int
    samples: int
    phases: Mapping[str, Sequence[float]]
    memory: Mapping[str, Sequence[int]] = field(default_factory=dict)
    links: Sequence[tuple[int, float, float]] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.phases[PHASES[0]])

    def step_s(self, rank: int) -> float:
        """Seconds that a step took on a rank."""
        return sum(self.phases[phase][rank] for phase in PHASES)

    def own_s(self, rank: int) -> float:
        """Seconds of a step in which a rank did not wait for others."""
        return self.step_s(rank) - self.phases["waiting"][rank]

    @property
    def samples_per_s(self) -> float:
        """Samples of all ranks in a second of rank 0's steps."""
        seconds = self.step_s(0) * self.steps
        return self.samples / seconds if seconds > 0 else math.nan

    def to_line(self) -> str:
        """As a line of ranks.jsonl, with times in whole microseconds."""
        content: dict[str, Any] = {"time": round(self.time_s, 3)}
        content |= {name: getattr(self, name) for name in _COUNTS}
        content |= {f"{phase}_us": [round(seconds * 1e6) for seconds in self.phases[phase]] for phase in PHASES}
        content |= {f"{kind}_bytes": list(self.memory[kind]) for kind in MEMORY if any(self.memory.get(kind, ()))}
        if any(peer >= 0 for peer, _, _ in self.links):
            content["links"] = [[peer, round(worst * 1e6), round(usual * 1e6)] for peer, worst, usual in self.links]
        return json.dumps(content, separators=(",", ":")) + "\n"


def mean_window(windows: Sequence[Window]) -> Window:
    """One window for several of one world size, each step counting alike; of memory the most."""
    if len(windows) == 1:
        return windows[0]
    last, steps = windows[-1], sum(window.steps for window in windows)
    ranks = range(last.world_size)
    phases = {p: [sum(w.phases[p][r] * w.steps for w in windows) / steps for r in ranks] for p in PHASES}
    memory = {
        kind: [max(w.memory.get(kind, [0] * last.world_size)[r] for w in windows) for r in ranks]
        for kind in last.memory
    }
    samples = sum(window.samples for window in windows)
    return Window(last.time_s, last.step, last.epoch, last.start, steps, samples, phases, memory)


def read_window(line: str) -> Window | None:
    """The window of a line of ranks.jsonl; None when it is none, or only a part of one."""
    try:
        found: Any = json.loads(line)
        phases = {phase: [value / 1e6 for value in found[f"{phase}_us"]] for phase in PHASES}
        ranks = len(phases[PHASES[0]])
        memory = {kind: [int(b) for b in found.get(f"{kind}_bytes") or [0] * ranks] for kind in MEMORY}
        links = [(int(peer), worst / 1e6, usual / 1e6) for peer, worst, usual in found.get("links", ())]
        counts = {name: int(found[name]) for name in _COUNTS}
        window = Window(float(found["time"]), **counts, phases=phases, memory=memory, links=links)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    lengths = {len(values) for values in [*phases.values(), *memory.values()]}
    # Whatever stands in the file, nothing that cannot be drawn goes further.
    numbers = [window.time_s, window.step, window.samples, *(value for values in phases.values() for value in values)]
    numbers += [value for link in window.links for value in (link[0] + 1, *link[1:])]
    sound = all(0 <= value < 1e15 for value in numbers) and len(window.links) in (0, ranks)
    return window if lengths == {ranks} and ranks and sound and 0 < window.steps < 1e15 else None


def drop_windows_after(folder: Path, step: int) -> None:
    """Drops what a killed process wrote after the step from which the run goes on, and what is damaged."""
    path = folder / RANKS
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace", opener=plain_file) as file:
        lines = file.read().splitlines()
    remaining = [line for line in lines if (window := read_window(line)) is not None and window.step <= step]
    if remaining != lines:
        write_atomically(path, "".join(line + "\n" for line in remaining))
