"""The charts of one run, or of several over each other: what is drawn, and what a reader is told of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .chart import RUN_COLOURS, Chart, Layer, Series, plain_tick
from .curve import Bucket, Curve
from .run import Run
from .tables import PHASES, Window, mean_window
from .units import short_count

_POINTS = 240
_LAYERED = 160
_MARKS = 40
_RANK_LINES = RUN_COLOURS


def charts(runs: Sequence[Run], labels: Sequence[str]) -> list[Chart]:
    """All charts for which there are numbers, the loss first. `labels` are the runs' names, no two alike."""
    drawn: list[Chart | None] = [*curves(runs, labels)]
    if len(runs) == 1:
        drawn += [_phases(runs[0]), _waiting(runs[0]), _memory(runs[0])]
    else:
        drawn.append(_over_windows(runs, labels, "time of a step", lambda w: _mean_step_s(w) * 1e3, _milliseconds))
    if any(len({row.get("learning_rate") for row in run.epochs}) > 1 for run in runs):
        drawn.append(_metric(runs, labels, "learning_rate", "learning rate"))
    return _alike(runs, drawn)


def curves(runs: Sequence[Run], labels: Sequence[str]) -> list[Chart]:
    """The first of the charts: loss, what was logged, and the speed."""
    drawn = [_loss(runs, labels)]
    for name in dict.fromkeys(name for run in runs for name in run.logged):
        if not (len(runs) == 1 and "loss" in name):  # of one run they stand beside the training loss
            drawn.append(_metric(runs, labels, name, name.replace("_", " ")))
    return _alike(runs, [*drawn, _speed(runs, labels)])


def _alike(runs: Sequence[Run], drawn: Sequence[Chart | None]) -> list[Chart]:
    """Those that there are, over the same steps."""
    until = max((float(run.step) for run in runs), default=0.0)
    return [replace(chart, until=until) for chart in drawn if chart is not None]


def run_colour(index: int) -> str:
    """The name of the colour of the run (or line) number `index`."""
    return f"run{index % RUN_COLOURS}"


def mean_windows(windows: Sequence[Window], most: int) -> list[Window]:
    """The windows, neighbours of one world size put together so that there are about `most`; each step counts alike."""
    each = max(1, -(-len(windows) // most))
    groups: list[list[Window]] = []
    for window in windows:
        last = groups[-1] if groups else None
        if last is None or len(last) >= each or last[-1].world_size != window.world_size:
            groups.append([window])
        else:
            last.append(window)
    return [mean_window(group) for group in groups]


# -- loss and metrics -------------------------------------------------------------------------------------------------


def _loss(runs: Sequence[Run], labels: Sequence[str]) -> Chart | None:
    series: list[Series] = []
    for index, run in enumerate(runs):
        buckets = run.losses.buckets
        epochs = [(row["step"], row.get("loss", math.nan)) for row in run.epochs]
        if not buckets and not epochs:
            continue
        label = "training loss" if len(runs) == 1 else labels[index]
        if buckets:
            series.append(_curve_series(label, buckets, run_colour(index), band=len(runs) == 1))
        else:
            series.append(Series(label, epochs, run_colour(index), dots=len(epochs) <= 40))
        if len(runs) == 1:
            for other, name in enumerate((name for name in run.logged if "loss" in name), 1):
                points = _of_epochs(run, name)
                series.append(Series(name.replace("_", " "), points, run_colour(other), dots=len(points) <= 40))
    return _lines("loss", runs, series, may_be_log=True)


def _curve_series(label: str, buckets: Sequence[Bucket], colour: str, *, band: bool) -> Series:
    points = [(bucket.middle, bucket.mean) for bucket in buckets]
    edges = [(bucket.middle, bucket.low, bucket.high) for bucket in buckets] if band else []
    if all(bucket.count == 1 for bucket in buckets):
        edges = []
    missing = _thin([bucket.middle for bucket in buckets if bucket.missing])
    return Series(label, points, colour, band=edges, missing=missing)


def _thin(places: Sequence[float]) -> list[float]:
    return list(places[:: max(1, -(-len(places) // _MARKS))])


def _metric(runs: Sequence[Run], labels: Sequence[str], name: str, title: str) -> Chart | None:
    series = []
    for index, run in enumerate(runs):
        points = _of_epochs(run, name)
        if points:
            label = title if len(runs) == 1 else labels[index]
            colour = run_colour(1 if len(runs) == 1 and name != "learning_rate" else index)
            missing = _thin([x for x, y in points if not math.isfinite(y)])
            series.append(Series(label, points, colour, dots=len(points) <= 40, missing=missing))
    return _lines(title, runs, series, may_be_log="loss" in name)


def _of_epochs(run: Run, name: str) -> list[tuple[float, float]]:
    points = [(row["step"], row[name]) for row in run.epochs if name in row]
    if len(points) <= _POINTS:
        return points
    return [(bucket.middle, bucket.mean) for bucket in Curve(_POINTS, points).buckets]


# -- speed, phases, memory --------------------------------------------------------------------------------------------


def _speed(runs: Sequence[Run], labels: Sequence[str]) -> Chart | None:
    title = "samples per second"
    chart = _over_windows(runs, labels, title, lambda window: window.samples_per_s, short_count)
    return chart or _metric(runs, labels, "samples_per_s", title)


def _over_windows(
    runs: Sequence[Run],
    labels: Sequence[str],
    title: str,
    value: Callable[[Window], float],
    show: Callable[[float], str],
) -> Chart | None:
    series = []
    for index, run in enumerate(runs):
        points = [(_middle(window), value(window)) for window in mean_windows(run.windows, _LAYERED)]
        label, colour = (title, run_colour(2)) if len(runs) == 1 else (labels[index], run_colour(index))
        series += [Series(label, points, colour, dots=len(points) <= 3)] if points else []
    return _lines(title, runs, series, from_zero=True, show=show)


def _mean_step_s(window: Window) -> float:
    return sum(sum(window.phases[phase]) for phase in PHASES) / window.world_size


def _phases(run: Run) -> Chart | None:
    windows = mean_windows(run.windows, _LAYERED)
    if not windows:
        return None
    layers = [Layer(p, [sum(w.phases[p]) / w.world_size * 1e3 for w in windows], p) for p in PHASES]
    return Chart(
        "where the time of a step goes (mean of the ranks)",
        layers=layers,
        edges=[float(max(0, windows[0].step - windows[0].steps)), *(float(w.step) for w in windows)],
        starts=_starts([run]),
        show=_milliseconds,
    )


def _waiting(run: Run) -> Chart | None:
    """Each rank's own time: a straggler's line lies above the others'."""
    windows = mean_windows([w for w in run.windows if w.world_size > 1], _LAYERED)
    if not windows:
        return None
    ranks = max(window.world_size for window in windows)
    own = {r: statistics.fmean([w.own_s(r) for w in windows if r < w.world_size]) for r in range(ranks)}
    slowest = sorted(sorted(own, key=lambda rank: -own[rank])[:_RANK_LINES])
    series = []
    for index, rank in enumerate(slowest):
        points = [(_middle(w), w.own_s(rank) * 1e3 if rank < w.world_size else math.nan) for w in windows]
        series.append(Series(f"rank {rank}", points, run_colour(index), dots=len(points) <= 3))
    title = "each rank's own time (a step without waiting)"
    if ranks > len(slowest):
        title = f"own time of the {len(slowest)} slowest of {ranks} ranks (a step without waiting)"
    return _lines(title, [run], series, from_zero=True, show=_milliseconds)


def _memory(run: Run) -> Chart | None:
    windows = mean_windows(run.windows, _LAYERED)
    gpu = any(any(window.memory.get("cuda", ())) for window in windows)
    kinds = ("cuda", "cuda_peak") if gpu else ("resident", "peak")
    if not any(any(window.memory.get(kinds[0], ())) for window in windows):
        return None
    series = []
    for index, (kind, label) in enumerate(zip(kinds, ("held", "most since the process began"), strict=True)):
        points = [(_middle(w), max(w.memory[kind]) / 2**20) for w in windows if w.memory.get(kind)]
        series.append(Series(label, points, run_colour(index), dots=len(points) <= 3))
    where = "GPU memory" if gpu else "memory"
    title = f"{where} of the rank that holds most"
    return _lines(title, [run], series, from_zero=True, show=lambda value: f"{plain_tick(value)} MiB")


def _middle(window: Window) -> float:
    """Return the place of a window's mean on the axis of steps."""
    return window.step - window.steps / 2


def _milliseconds(value: float) -> str:
    return f"{plain_tick(value)} ms"


# -- small things -----------------------------------------------------------------------------------------------------


def _lines(title: str, runs: Sequence[Run], series: Sequence[Series], **options: Any) -> Chart | None:
    """The chart of some lines; None where there are none."""
    return Chart(title, series=series, starts=_starts(runs), **options) if series else None


def _starts(runs: Sequence[Run]) -> list[float]:
    """Return the steps at which a run restarted; of one run only, since lines of several are unreadable."""
    again = runs[0].starts[1:] if len(runs) == 1 else []
    return sorted({float(event.step) for event in again if event.step > 0})
