"""Charts drawn by matplotlib: lines with gaps, bands, layers, marks. Know nothing of runs.

A colour is a name, which LIGHT and DARK give a value: on white, and on a dark page.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from .tables import PHASES
from .units import short_count

RUN_COLOURS = 6  # run0 to run5

_INCHES = (480 / 72, 270 / 72)  # a point is a unit of the picture
_IN_A_ROW = 4
_LOG_FROM = 20  # a curve over a larger factor is drawn over the logarithm
_NAMES = (*PHASES, *(f"run{index}" for index in range(RUN_COLOURS)), "soft", "rule", "bad")
_ON_WHITE = """
    #b26a00 #2f86c4 #1d4f91 #c2392b #1e8449 #78838f
    #1f6fb2 #c4521a #22814f #7c4fa3 #95690a #b8336a
    #55606d #dfe3e8 #b3261e
"""
_ON_BLACK = """
    #e6a23c #74bdf0 #4a86dc #ee6a5a #4fc38a #8f9ba8
    #6db3ee #f2925f #5cc994 #c09be6 #e0b652 #f283ae
    #a3aebb #323d49 #ff8f80
"""
LIGHT, DARK = (dict(zip(_NAMES, colours.split(), strict=True)) for colours in (_ON_WHITE, _ON_BLACK))


def _style(colours: Mapping[str, str]) -> dict[Any, Any]:
    return {
        "font.family": "sans-serif",
        "font.size": 12,
        "svg.fonttype": "none",  # text stays text: small, sharp and searchable
        "axes.edgecolor": colours["rule"],
        "xtick.labelcolor": colours["soft"],
        "ytick.labelcolor": colours["soft"],
        "lines.linewidth": 1.8,
        "lines.markersize": 4.5,
    }


def plain_tick(value: float) -> str:
    """A round value at an axis: 0.05, 20, 1e-06, 20k."""
    return short_count(value) if abs(value) >= 1e4 else f"{value:g}"


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        label: for the key.
        points: (x, y) in the order of x; NaN in y is a gap.
        colour: its name.
        band: (x, low, high) drawn faintly behind the line.
        missing: places of values that were no numbers, marked at the upper edge.
        dots: whether each point gets a dot (few points, measured seldom).
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: str
    band: Sequence[tuple[float, float, float]] = ()
    missing: Sequence[float] = ()
    dots: bool = False


@dataclass(frozen=True)
class Layer:
    """One layer of a stack: a height for each block."""

    label: str
    heights: Sequence[float]
    colour: str


@dataclass(frozen=True)
class Chart:
    """A chart: lines over one axis, or a stack of layers.

    Attributes:
        title: heading.
        series: lines.
        layers, edges: a stack of blocks, each constant between two neighbouring edges: one more than heights.
        until: the x axis goes from 0 to here, so that all charts of a page have the same; None: to the last point.
        from_zero: whether the y axis begins at zero (always so for a stack).
        may_be_log: whether the y axis is logarithmic where all values are above 0 and far apart.
        starts: places of dotted lines, where the run was started again.
        show: how a value of y is written at the axis.
    """

    title: str
    series: Sequence[Series] = ()
    layers: Sequence[Layer] = ()
    edges: Sequence[float] = ()
    until: float | None = None
    from_zero: bool = False
    may_be_log: bool = False
    starts: Sequence[float] = ()
    show: Callable[[float], str] = plain_tick

    @property
    def key(self) -> list[tuple[str, str]]:
        """(label, colour) of all that is drawn, where there is more than one."""
        found = [(s.label, s.colour) for s in self.series] + [(layer.label, layer.colour) for layer in self.layers]
        return found if len(found) > 1 else []

    @property
    def summary(self) -> str:
        """Describe the chart in text, for users who do not see it."""
        sentences = []
        for each in self.series:
            values = [y for _, y in each.points] + [y for _, low, high in each.band for y in (low, high)]
            finite = [y for y in values if math.isfinite(y)]
            if finite:
                ends = (each.points[0][1], each.points[-1][1], min(finite), max(finite))
                first, last, low, high = map(self._words, ends)
                sentences.append(f"{each.label}: {first} at first, {last} at last, between {low} and {high}.")
        means = [f"{layer.label} {self._words(sum(layer.heights) / len(layer.heights))}" for layer in self.layers]
        return " ".join([*sentences, f"In the mean: {', '.join(means)}."] if means else sentences)

    def _words(self, value: float) -> str:
        return self.show(float(f"{value:.3g}"))

    def svg(self, colours: Mapping[str, str]) -> str:
        """Return an SVG document without a background; "" where there is no finite value to draw."""
        if not self._values():
            return ""
        with matplotlib.rc_context({**_style(colours), "svg.hashsalt": self.title}):
            figure = Figure(figsize=_INCHES)
            axes = figure.add_axes((58 / 480, 34 / 270, 408 / 480, 224 / 270))
            axes.patch.set_visible(False)
            figure.patch.set_visible(False)
            self.draw(axes, colours)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
        return text.getvalue()

    def draw(self, axes: Axes, colours: Mapping[str, str]) -> None:
        """Draws it, with a colour for each name; at least one value has to be finite."""
        values = self._values()
        log = self.may_be_log and min(values) > 0 and max(values) > _LOG_FROM * min(values)
        self._prepare(axes, values, log)
        axes.grid(axis="y", color=colours["rule"], linewidth=1)
        self._draw_layers(axes, colours)
        for each in self.series:
            _draw(axes, each, colours)
        for x in self.starts:
            axes.axvline(x, color=colours["soft"], linewidth=1, linestyle=(0, (2, 4)), gid="again")

    def _values(self) -> list[float]:
        values = [y for each in self.series for _, y in each.points]
        values += [y for each in self.series for _, low, high in each.band for y in (low, high)]
        values += [sum(column) for column in zip(*(layer.heights for layer in self.layers), strict=True)]
        return [value for value in values if math.isfinite(value)]

    def _prepare(self, axes: Axes, values: Sequence[float], log: bool) -> None:
        """Limits, round values at the axes, and a rule at each of y."""
        low, high = min(values), max(values)
        if self.from_zero or self.layers:
            low, high = min(low, 0.0), max(high, 0.0)
        if log:
            axes.set_yscale("log")
            axes.set_ylim(low / 1.15, high * 1.15)
            axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5) if high < 300 * low else (1,), numticks=7))
        else:
            margin = 0.06 * (high - low) or abs(low) * 0.1 or 1.0
            axes.set_ylim(0.0 if low == 0 else low - margin, high + margin)  # a margin below 0 suggests values there
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        xs = [x for each in self.series for x, _ in each.points] + list(self.edges) + [self.until or 0.0]
        axes.set_xlim(min(0.0, *xs), max(xs) or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: self.show(value)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, place: short_count(x) if x else "step 0"))
        axes.tick_params(left=False, bottom=False, which="both", pad=7)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)

    def _draw_layers(self, axes: Axes, colours: Mapping[str, str]) -> None:
        # Staircases: a block's height is a mean over its steps, and between blocks there is nothing to interpolate.
        below = [0.0] * (len(self.edges) - 1)
        for layer in self.layers:
            above = [b + height for b, height in zip(below, layer.heights, strict=True)]
            colour = colours[layer.colour]
            axes.stairs(above, self.edges, baseline=below, fill=True, color=colour, linewidth=0, label=layer.label)
            below = above


def picture(charts: Sequence[Chart], title: str) -> Figure:
    """Charts in one picture, four in a row; those without a finite value are left out."""
    drawn = [chart for chart in charts if chart._values()]
    columns = max(1, min(_IN_A_ROW, len(drawn)))
    rows = max(1, -(-len(drawn) // columns))
    width, height = 4.6 * columns + 0.2, 3.4 * rows + 0.7
    with matplotlib.rc_context({**_style(LIGHT), "font.size": 9}):
        # No pyplot: it would pick a window system and keep global state in the user's process.
        # Fixed margins, in inches: a layout engine would draw everything twice to find them.
        figure = Figure(figsize=(width, height), facecolor="white")
        panels = figure.subplots(rows, columns, squeeze=False).flat
        figure.subplots_adjust(0.62 / width, 0.4 / height, 1 - 0.3 / width, 1 - 0.75 / height, 0.2, 0.3)
        for axes, chart in itertools.zip_longest(panels, drawn):
            if chart is None:
                axes.set_visible(False)
                continue
            chart.draw(axes, LIGHT)
            axes.set_title(chart.title, loc="left", fontsize=10)
            if chart.key:
                axes.legend(frameon=False, fontsize=8)
        figure.suptitle(title, fontsize=11, x=0.15 / width, ha="left")
    return figure


def _draw(axes: Axes, series: Series, colours: Mapping[str, str]) -> None:
    colour = colours[series.colour]
    if series.band:
        xs, lows, highs = zip(*series.band, strict=True)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.2, linewidth=0)
    points = [(x, y if math.isfinite(y) else math.nan) for x, y in series.points]
    finite = [False, *(math.isfinite(y) for _, y in points), False]
    dots = [i for i in range(len(points)) if finite[i + 1] and (series.dots or not (finite[i] or finite[i + 2]))]
    xs, ys = zip(*points, strict=True) if points else ((), ())
    axes.plot(
        xs, ys, color=colour, marker="o" if dots else "", markevery=dots, label=series.label, gid="line", clip_on=False
    )
    if series.missing:
        top = [1.0 - 0.02] * len(series.missing)
        at_top = axes.get_xaxis_transform()
        axes.plot(series.missing, top, "x", color=colours["bad"], transform=at_top, gid="missing")
