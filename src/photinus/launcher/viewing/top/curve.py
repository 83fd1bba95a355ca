"""A curve out of characters: a sparkline as wide as there is room."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from ....runlog.curve import Curve

__all__ = ["Sparkline", "sparkline"]

_LEVELS = "▁▂▃▄▅▆▇█"
_MISSING = "×"


class Sparkline:
    """A curve of at most 60 characters, for rich; nothing where it has one point or next to no room."""

    def __init__(self, curve: Curve) -> None:
        self._curve = curve

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 60)
        drawn = width >= 4 and len(self._curve.buckets) > 1
        yield Text(sparkline(self._curve.means(width)) if drawn else "", "cyan", no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, min(options.max_width, 60))


def sparkline(values: Sequence[float]) -> str:
    """A character per value, from the lowest to the highest one; × where there is none (NaN, infinite).

    Values that are all equal lie in the middle. Where all are positive and span more than a factor of 20, heights
    follow their logarithms, or the end of a falling loss would be a flat line.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return _MISSING * len(values)
    low, high = min(finite), max(finite)
    if low > 0 and high > 20 * low:
        values = [math.log(value) if math.isfinite(value) else value for value in values]
        low, high = math.log(low), math.log(high)
    top = len(_LEVELS) - 1

    def level(value: float) -> str:
        return _LEVELS[round((value - low) / (high - low) * top) if high > low else 3]

    return "".join(level(value) if math.isfinite(value) else _MISSING for value in values)
