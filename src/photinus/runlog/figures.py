"""The charts of one run, or of several over each other: each an SVG for a page, or the first of them in one picture.

matplotlib draws them. A drawing is a function that gets empty Axes, and returns whether it drew a finite value.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from .curve import Curve
from .run import Run
from .tables import PHASES, Window, mean_window
from .units import short_count

RUN_COLOURS = ("#1f6fb2", "#c4521a", "#22814f", "#7c4fa3", "#95690a", "#b8336a")
PHASE_COLOURS = dict(zip(PHASES, ("#b26a00", "#2f86c4", "#1d4f91", "#c2392b", "#1e8449", "#78838f"), strict=True))
SOFT, RULE, BAD = "#55606d", "#dfe3e8", "#b3261e"

_INCHES = (480 / 72, 270 / 72)  # a point is a unit of the SVG
_IN_A_ROW = 4
_LOG_FROM = 20  # values that span a larger factor have a logarithmic axis
_POINTS = 240
_WINDOWS = 160
_MARKS = 40
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 12,
    "svg.fonttype": "none",  # text stays text: small, sharp and searchable
    "svg.hashsalt": "photinus",  # the same numbers give the same file
    "axes.edgecolor": RULE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}

_Drawing = Callable[[Axes], bool]


@dataclass(frozen=True)
class Chart:
    """A chart of a page.

    Attributes:
        title: heading.
        key: (label, colour) of all that is drawn; [] for a single line.
        summary: the chart in words, for users who do not see it.
        svg: SVG document.
    """

    title: str
    key: Sequence[tuple[str, str]]
    summary: str
    svg: str


def charts(runs: Sequence[Run], labels: Sequence[str]) -> list[Chart]:
    """Return all charts for which there are numbers, the loss first. `labels` are names of the runs, all different."""
    drawings = [*_curves(runs, labels)]
    if len(runs) == 1:
        drawings += [partial(draw, runs[0]) for draw in (_phases, _own_times, _memory)]
    else:
        drawings.append(partial(_windows, runs, labels, "time of a step", _step_ms, _milliseconds))
    if any(len({row.get("learning_rate") for row in run.epochs}) > 1 for run in runs):
        drawings.append(partial(_metric, runs, labels, "learning_rate"))
    return [chart for chart in map(_chart, drawings) if chart is not None]


def picture(run: Run, title: str) -> Figure:
    """Return one figure of the loss, what was logged, and the speed, four charts in a row."""
    with matplotlib.rc_context({**_STYLE, "font.size": 9}):
        # No pyplot: it would pick a window system and keep global state in the user's process.
        figure = Figure(facecolor="white")
        for draw in _curves([run], [run.name]):
            axes = figure.add_subplot()
            if not draw(axes):
                axes.remove()
                continue
            axes.set_title(str(axes.get_label()), loc="left", fontsize=10)
            if len(axes.get_legend_handles_labels()[1]) > 1:
                axes.legend(frameon=False, fontsize=8)
        columns = max(1, min(_IN_A_ROW, len(figure.axes)))
        rows = max(1, -(-len(figure.axes) // columns))
        width, height = 4.6 * columns + 0.2, 3.4 * rows + 0.7
        figure.set_size_inches(width, height)
        # Fixed margins, in inches: a layout engine would draw everything twice to find them.
        sides = {"left": 0.62 / width, "right": 1 - 0.3 / width, "bottom": 0.4 / height, "top": 1 - 0.75 / height}
        grid = figure.add_gridspec(rows, columns, wspace=0.2, hspace=0.3, **sides)
        for place, axes in enumerate(figure.axes):
            axes.set_subplotspec(grid[place])
        figure.suptitle(title, fontsize=11, x=0.15 / width, ha="left")
    return figure


def run_colour(index: int) -> str:
    """Return the colour of the run (or line) number `index`."""
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def mean_windows(windows: Sequence[Window], most: int) -> list[Window]:
    """Return about `most` windows: neighbours of one world size are joined, each step counting the same."""
    each = max(1, -(-len(windows) // most))
    groups: list[list[Window]] = []
    for window in windows:
        last = groups[-1] if groups else None
        if last is None or len(last) >= each or last[-1].world_size != window.world_size:
            groups.append([window])
        else:
            last.append(window)
    return [mean_window(group) for group in groups]


def _chart(draw: _Drawing) -> Chart | None:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_INCHES)
        figure.patch.set_visible(False)
        axes: Any = figure.add_axes((58 / 480, 34 / 270, 408 / 480, 224 / 270))
        axes.patch.set_visible(False)
        if not draw(axes):
            return None
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    artists, names = axes.get_legend_handles_labels()
    colours = [to_hex(each.get_facecolor() if each in axes.patches else each.get_color()) for each in artists]
    key = [*zip(names, colours, strict=True)]
    return Chart(axes.get_label(), key if len(key) > 1 else [], _summary(axes), text.getvalue())


def _summary(axes: Any) -> str:
    def text_of(value: float) -> str:
        return str(axes.yaxis.get_major_formatter()(float(f"{value:.3g}")))

    sentences = []
    for line in axes.get_lines():
        finite = [y for y in line.get_ydata() if math.isfinite(y)]
        if finite and line.get_gid() == "line":
            sentences.append(f"{line.get_label()}: {text_of(finite[0])} at first, {text_of(finite[-1])} at last.")
    for layer in axes.patches:
        heights, _, below = layer.get_data()
        sentences.append(f"{layer.get_label()}: {text_of(statistics.fmean(heights - below))} in the mean.")
    low, high = axes.dataLim.intervaly
    return " ".join([*sentences, f"All values are between {text_of(low)} and {text_of(high)}."])


# -- loss and metrics -------------------------------------------------------------------------------------------------


def _curves(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[_Drawing]:
    """Yield the first drawings: loss, what was logged, and the speed."""
    yield partial(_loss, runs, labels)
    for name in dict.fromkeys(name for run in runs for name in run.logged):
        if not (len(runs) == 1 and "loss" in name):  # of one run they are beside the training loss
            yield partial(_metric, runs, labels, name)
    if any(run.windows for run in runs):
        yield partial(_windows, runs, labels, "samples per second", lambda w: w.samples_per_s, short_count)
    else:
        yield partial(_metric, runs, labels, "samples_per_s")


def _loss(runs: Sequence[Run], labels: Sequence[str], axes: Axes) -> bool:
    labels = labels if len(runs) > 1 else ["training loss"]
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        if bins := run.losses.bins:
            if len(runs) == 1:
                sides = ([b.low for b in bins], [b.high for b in bins])
                axes.fill_between(
                    [b.middle for b in bins], *sides, color=run_colour(0), alpha=0.2, linewidth=0, gid="band"
                )
            missing = [b.middle for b in bins if b.missing]
            _line(axes, label, [(b.middle, b.mean) for b in bins], run_colour(index), missing=missing)
        else:
            _line_of_epochs(axes, label, run, "loss", run_colour(index))
    if len(runs) == 1:
        for index, name in enumerate((name for name in runs[0].logged if "loss" in name), 1):
            _line_of_epochs(axes, name.replace("_", " "), runs[0], name, run_colour(index))
    return _finish(axes, "loss", runs, may_be_log=True)


def _metric(runs: Sequence[Run], labels: Sequence[str], name: str, axes: Axes) -> bool:
    title = {"samples_per_s": "samples per second"}.get(name, name.replace("_", " "))
    for index, run in enumerate(runs):
        colour = run_colour(1 if len(runs) == 1 and name != "learning_rate" else index)
        _line_of_epochs(axes, title if len(runs) == 1 else labels[index], run, name, colour)
    return _finish(axes, title, runs, may_be_log="loss" in name)


def _line_of_epochs(axes: Axes, label: str, run: Run, name: str, colour: str) -> None:
    points = [(row["step"], row[name]) for row in run.epochs if name in row]
    missing = [x for x, y in points if not math.isfinite(y)]
    if len(points) > _POINTS:
        points = [(each.middle, each.mean) for each in Curve(_POINTS, points).bins]
    _line(axes, label, points, colour, missing=missing, few=40)


# -- speed, phases, memory --------------------------------------------------------------------------------------------


def _windows(
    runs: Sequence[Run],
    labels: Sequence[str],
    title: str,
    value: Callable[[Window], float],
    show: Callable[[float], str],
    axes: Axes,
) -> bool:
    for index, run in enumerate(runs):
        points = [(_middle(window), value(window)) for window in mean_windows(run.windows, _WINDOWS)]
        label, colour = (title, run_colour(2)) if len(runs) == 1 else (labels[index], run_colour(index))
        _line(axes, label, points, colour)
    return _finish(axes, title, runs, from_zero=True, show=show)


def _phases(run: Run, axes: Axes) -> bool:
    windows = mean_windows(run.windows, _WINDOWS)
    if not windows:
        return False
    edges = [max(0, windows[0].step - windows[0].steps), *(window.step for window in windows)]
    below = [0.0] * len(windows)
    for phase, colour in PHASE_COLOURS.items():
        # Staircases: a block's height is a mean over its steps, and between blocks there is nothing to interpolate.
        above = [b + statistics.fmean(w.phases[phase]) * 1e3 for b, w in zip(below, windows, strict=True)]
        axes.stairs(above, edges, baseline=below, fill=True, color=colour, linewidth=0, label=phase)
        below = above
    title = "where the time of a step goes (mean of the ranks)"
    return _finish(axes, title, [run], from_zero=True, show=_milliseconds)


def _own_times(run: Run, axes: Axes) -> bool:
    """Draw the own time of each rank: a straggler's line is above those of the others."""
    windows = mean_windows([w for w in run.windows if w.world_size > 1], _WINDOWS)
    ranks = max((window.world_size for window in windows), default=0)
    own = {r: statistics.fmean([w.own_s(r) for w in windows if r < w.world_size]) for r in range(ranks)}
    slowest = sorted(sorted(own, key=lambda rank: -own[rank])[: len(RUN_COLOURS)])
    for index, rank in enumerate(slowest):
        points = [(_middle(w), w.own_s(rank) * 1e3 if rank < w.world_size else math.nan) for w in windows]
        _line(axes, f"rank {rank}", points, run_colour(index))
    title = "each rank's own time (a step without waiting)"
    if ranks > len(slowest):
        title = f"own time of the {len(slowest)} slowest of {ranks} ranks (a step without waiting)"
    return _finish(axes, title, [run], from_zero=True, show=_milliseconds)


def _memory(run: Run, axes: Axes) -> bool:
    windows = mean_windows(run.windows, _WINDOWS)
    on_gpu = any(any(window.memory.get("cuda", ())) for window in windows)
    kinds = ("cuda", "cuda_peak") if on_gpu else ("resident", "peak")
    if not any(any(window.memory.get(kinds[0], ())) for window in windows):
        return False
    for index, (kind, label) in enumerate(zip(kinds, ("held", "most since the process began"), strict=True)):
        points = [(_middle(w), max(w.memory[kind]) / 2**20) for w in windows if w.memory.get(kind)]
        _line(axes, label, points, run_colour(index))
    title = f"{'GPU memory' if on_gpu else 'memory'} of the rank that holds most"
    return _finish(axes, title, [run], from_zero=True, show=lambda value: f"{_plain(value)} MiB")


def _middle(window: Window) -> float:
    """Return the place of a window's mean on the axis of steps."""
    return window.step - window.steps / 2


def _step_ms(window: Window) -> float:
    return sum(sum(window.phases[phase]) for phase in PHASES) / window.world_size * 1e3


# -- what all drawings do ---------------------------------------------------------------------------------------------


def _line(
    axes: Axes,
    label: str,
    points: Sequence[tuple[float, float]],
    colour: str,
    *,
    missing: Sequence[float] = (),
    few: int = 3,
) -> None:
    """Draw a line through points (x, y) in the order of x. Infinite and NaN y are gaps.

    Args:
        missing: places of values that were not numbers; some are marked at the upper edge.
        few: up to this many points each have a dot. Points between gaps always have one.
    """
    if not points:
        return
    finite = [False, *(math.isfinite(y) for _, y in points), False]
    dots = [i for i in range(len(points)) if finite[i + 1] and (len(points) <= few or not (finite[i] or finite[i + 2]))]
    xs, ys = zip(*((x, y if math.isfinite(y) else math.nan) for x, y in points), strict=True)
    marks: dict[str, Any] = {"marker": "o", "markevery": dots} if dots else {}
    axes.plot(xs, ys, color=colour, label=label, gid="line", clip_on=False, **marks)
    if missing:
        some = missing[:: max(1, -(-len(missing) // _MARKS))]
        axes.plot(some, [0.98] * len(some), "x", color=BAD, transform=axes.get_xaxis_transform(), gid="missing")


def _finish(
    axes: Axes,
    title: str,
    runs: Sequence[Run],
    *,
    show: Callable[[float], str] | None = None,
    from_zero: bool = False,
    may_be_log: bool = False,
) -> bool:
    """Set limits and ticks of drawn axes. Return False if there is no finite value.

    Args:
        title: label of the axes.
        runs: the x axis ends with the longest, and dotted lines show where a single one restarted.
        show: writes a value at the y axis; default: the plain number.
        from_zero: let the y axis begin at zero.
        may_be_log: make the y axis logarithmic if all values are above 0 and far apart.
    """
    low, high = axes.dataLim.intervaly
    if not math.isfinite(high - low):
        return False
    write = show or _plain
    axes.set_label(title)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if may_be_log and low > 0 and high > _LOG_FROM * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.15, high * 1.15)
        axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5) if high < 300 * low else (1,), numticks=7))
    else:
        margin = 0.06 * (high - low) or abs(low) * 0.1 or 1.0
        axes.set_ylim(0.0 if low == 0 else low - margin, high + margin)  # a margin below 0 suggests values there
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    first, last = axes.dataLim.intervalx
    axes.set_xlim(min(0.0, first), max(last, *(run.step for run in runs)) or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: write(value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, place: short_count(x) if x else "step 0"))
    axes.tick_params(left=False, bottom=False, which="both", pad=7)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=RULE, linewidth=1)
    axes.spines[:].set_visible(False)
    again = runs[0].starts[1:] if len(runs) == 1 else []  # lines of several runs are unreadable
    for number, step in enumerate(sorted({event.step for event in again if event.step > 0})):
        label = "" if number else "restart"
        axes.axvline(step, color=SOFT, linewidth=1, linestyle=(0, (2, 4)), label=label, gid="restart")
    return True


def _plain(value: float) -> str:
    """Return a round value as an axis shows it: 0.05, 20, 1e-06, 20k."""
    return short_count(value) if abs(value) >= 1e4 else f"{value:g}"


def _milliseconds(value: float) -> str:
    return f"{_plain(value)} ms"
