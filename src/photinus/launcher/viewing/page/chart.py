"""A chart as SVG: axes with round numbers, lines with gaps, bands, layers, marks. Knows nothing of runs.

A chart scales with its column; text stays readable because the style sheet enlarges it where the page is narrow. Every
chart says in words what it shows, for those who do not see it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ..units import short_count

__all__ = ["Chart", "Layer", "Series", "Tip", "plain_tick", "ticks"]

_WIDTH, _HEIGHT = 480.0, 270.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 12.0, 34.0
_LOG_FROM = 20  # a curve over a larger factor is drawn over the logarithm

Point = tuple[float, float]


def plain_tick(value: float) -> str:
    """A round value at an axis: 0.05, 20, 1e-06, 20k."""
    return short_count(value) if abs(value) >= 1e4 else f"{value:g}"


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        label: for the key.
        points: (x, y) in the order of x; NaN in y is a gap.
        colour: a CSS value.
        band: (x, low, high) drawn faintly behind the line.
        missing: places of values that were no numbers, marked at the upper edge.
        dots: whether each point gets a dot (few points, measured seldom).
    """

    label: str
    points: Sequence[Point]
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
class Tip:
    """What a reader sees who points at the places from `begin` to `end`."""

    begin: float
    end: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart: lines over one axis, or a stack of layers.

    Attributes:
        title: heading.
        summary: what it shows, in words.
        series: lines.
        layers, edges: a stack of blocks, each constant between two neighbouring edges: one more than heights.
        until: the x axis goes from 0 to here, so that all charts of a page have the same; None: to the last point.
        from_zero: whether the y axis begins at zero (always so for a stack).
        may_be_log: whether the y axis is logarithmic where all values are above 0 and far apart.
        starts: places of dotted lines, where the run was started again.
        tips: by place, in order.
        show: how a value of y is written at the axis.
    """

    title: str
    summary: str
    series: Sequence[Series] = ()
    layers: Sequence[Layer] = ()
    edges: Sequence[float] = ()
    until: float | None = None
    from_zero: bool = False
    may_be_log: bool = False
    starts: Sequence[float] = ()
    tips: Sequence[Tip] = ()
    show: Callable[[float], str] = plain_tick

    def html(self, name: str) -> str:
        """The chart as a figure with heading, key and picture; `name` is unique on the page."""
        keys = [(series.label, series.colour) for series in self.series]
        keys += [(layer.label, layer.colour) for layer in self.layers]
        key = ""
        if len(keys) > 1:
            items = "".join(f'<li><i style="background:{colour}"></i>{escape(label)}</li>' for label, colour in keys)
            again = '<li><i class="again"></i>started again</li>' if self.starts else ""
            key = f'<ul class="key">{items}{again}</ul>'
        return f'<figure class="card"><h3>{escape(self.title)}</h3>{key}{self._svg(name)}</figure>'

    def _svg(self, name: str) -> str:
        xs = [x for each in self.series for x, _ in each.points] + list(self.edges)
        xs += [x for each in self.series for x in each.missing]
        ys = self._values()
        head = (
            f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-labelledby="{name}-t {name}-d">'
            f'<title id="{name}-t">{escape(self.title)}</title><desc id="{name}-d">{escape(self.summary)}</desc>'
        )
        if not xs or not ys:
            nothing = f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT / 2:.0f}" text-anchor="middle">no number to draw</text>'
            return f"{head}{nothing}</svg>"
        xs += [0.0] if self.until is None else [0.0, self.until]
        x_axis = _Axis.over(xs, _LEFT, _WIDTH - _RIGHT, tight=True)
        log = self.may_be_log and min(ys) > 0 and max(ys) > _LOG_FROM * min(ys)
        zero = [0.0] if self.from_zero or self.layers else []
        y_axis = _Axis.over([*ys, *zero], _HEIGHT - _BOTTOM, _TOP, log=log)
        parts = [head, self._grid(x_axis, y_axis), self._stack(x_axis, y_axis)]
        parts += [_drawn(each, x_axis, y_axis) for each in self.series]
        parts.append(self._tips(x_axis))
        return "".join(parts) + "</svg>"

    def _values(self) -> list[float]:
        values = [y for each in self.series for _, y in each.points]
        values += [y for each in self.series for _, low, high in each.band for y in (low, high)]
        values += [sum(column) for column in zip(*(layer.heights for layer in self.layers), strict=True)]
        return [value for value in values if math.isfinite(value)]

    def _grid(self, x_axis: _Axis, y_axis: _Axis) -> str:
        left, right, bottom = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts = []
        for value in y_axis.ticks(5):
            y = y_axis(value)
            parts.append(f'<path class="axis" d="M{left:.0f} {y:.1f}H{right:.0f}"/>')
            parts.append(_text(left - 7, y + 4, "end", escape(self.show(value))))
        for value in x_axis.ticks(5):
            if float(value).is_integer():
                x = x_axis(value)
                # A label at the end of the axis would stick out of the picture.
                anchor = "end" if x > right - 12 else "middle"
                parts.append(_text(x, bottom + 18, anchor, short_count(value) if value else "step 0"))
        parts += [
            f'<path class="start" d="M{x_axis(x):.1f} {_TOP:.0f}V{bottom:.0f}"><title>started again</title></path>'
            for x in self.starts
            if x_axis.low <= x <= x_axis.high
        ]
        return "".join(parts)

    def _stack(self, x_axis: _Axis, y_axis: _Axis) -> str:
        # Staircases: a block's height is a mean over its steps, and between blocks there is nothing to interpolate.
        xs = [x for pair in itertools.pairwise(self.edges) for x in pair]
        below = [0.0] * len(xs)
        parts = []
        for layer in self.layers:
            doubled = [height for height in layer.heights for _ in range(2)]
            above = [b + height for b, height in zip(below, doubled, strict=True)]
            forth = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in zip(xs, above, strict=True))
            back = " ".join(
                f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y in zip(reversed(xs), reversed(below), strict=True)
            )
            parts.append(f'<polygon points="{forth} {back}" style="fill:{layer.colour}"/>')
            below = above
        return "".join(parts)

    def _tips(self, x_axis: _Axis) -> str:
        top, bottom = _TOP, _HEIGHT - _BOTTOM
        parts = []
        for tip in self.tips:
            begin, end = x_axis(tip.begin), x_axis(tip.end)
            if end - begin < 2:
                begin, end = begin - 3, end + 3
            parts.append(
                f'<rect class="tip" x="{begin:.1f}" y="{top:.0f}" width="{end - begin:.1f}" '
                f'height="{bottom - top:.0f}"><title>{escape(tip.text)}</title></rect>'
            )
        return "".join(parts)


def _drawn(series: Series, x_axis: _Axis, y_axis: _Axis) -> str:
    parts = []
    for run in _unbroken([(x, low, high) for x, low, high in series.band]):
        forth = " ".join(f"{x_axis(x):.1f},{y_axis(high):.1f}" for x, _, high in run)
        back = " ".join(f"{x_axis(x):.1f},{y_axis(low):.1f}" for x, low, _ in reversed(run))
        parts.append(f'<polygon points="{forth} {back}" style="fill:{series.colour};fill-opacity:.2"/>')
    for run in _unbroken([(x, y, y) for x, y in series.points]):
        if len(run) == 1 and not series.dots:
            parts.append(_dot(x_axis(run[0][0]), y_axis(run[0][1]), series.colour, 2.2))
            continue
        points = " ".join(f"{x_axis(x):.1f},{y_axis(y):.1f}" for x, y, _ in run)
        parts.append(f'<polyline class="line" points="{points}" style="stroke:{series.colour}"/>')
        if series.dots:
            parts += [_dot(x_axis(x), y_axis(y), series.colour, 2.6) for x, y, _ in run]
    for x in series.missing:
        at = x_axis(x)
        parts.append(
            f'<path class="miss" d="M{at - 4:.1f} {_TOP:.0f}l8 8m0 -8l-8 8">'
            f"<title>no number (NaN or infinite) near step {x:.0f}</title></path>"
        )
    return "".join(parts)


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _dot(x: float, y: float, colour: str, radius: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" style="fill:{colour}"/>'


def _unbroken(points: Sequence[tuple[float, float, float]]) -> list[list[tuple[float, float, float]]]:
    """The stretches between gaps."""
    runs: list[list[tuple[float, float, float]]] = [[]]
    for point in points:
        if math.isfinite(point[1]) and math.isfinite(point[2]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


@dataclass(frozen=True)
class _Axis:
    """Values to places on the picture."""

    low: float
    high: float
    begin: float
    end: float
    log: bool

    @classmethod
    def over(
        cls, values: Sequence[float], begin: float, end: float, *, log: bool = False, tight: bool = False
    ) -> _Axis:
        low, high = min(values), max(values)
        if log:
            return cls(low / 1.15, high * 1.15, begin, end, log)
        if high <= low:  # one value, or all equal: it lies in the middle
            margin = abs(low) * 0.1 or 1.0
            return cls(low - margin, high + margin, begin, end, log)
        margin = 0.0 if tight else 0.06 * (high - low)
        # A margin below zero would suggest values there.
        return cls(0.0 if low == 0 else low - margin, high + margin, begin, end, log)

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, about: int) -> list[float]:
        return _log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, about)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values from `low` to `high`, some `about` of them: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999), power * 10)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # A product is rounded once, a sum at each step.
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    decades = math.log10(high / low)
    factors = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
    every = max(1, math.ceil(decades / 6))
    return [
        factor * 10.0**power
        for power in powers
        if power % every == 0
        for factor in factors
        if low <= factor * 10.0**power <= high
    ]
