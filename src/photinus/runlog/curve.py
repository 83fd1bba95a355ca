"""A curve of any number of points in a bounded number of bins, that hides no extreme.

Each bin keeps the lowest, the highest and the mean of its values, and how many of them were not numbers. When there are
too many bins, neighbours are joined in pairs. So points can be added one by one, any number of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bin:
    """Neighbouring points of a curve.

    Attributes:
        first, last: places of the first and the last point.
        count: number of points.
        missing: number of points that were NaN or infinite.
        low, high: the lowest and the highest finite value; inf and -inf if there is none.
        total: sum of the finite values.
    """

    first: float
    last: float
    count: int
    missing: int
    low: float
    high: float
    total: float

    @property
    def middle(self) -> float:
        """Place of its middle."""
        return (self.first + self.last) / 2

    @property
    def mean(self) -> float:
        """Mean of the finite values; NaN when there is none."""
        finite = self.count - self.missing
        return self.total / finite if finite else math.nan

    def join(self, other: Bin) -> Bin:
        """Join this bin and the one that follows."""
        return Bin(
            self.first,
            other.last,
            self.count + other.count,
            self.missing + other.missing,
            min(self.low, other.low),
            max(self.high, other.high),
            self.total + other.total,
        )


class Curve:
    """Points in the order of their places, in bins of the same number of points (the last has fewer).

    Args:
        most: largest number of bins, at least 2. Once there were more points, at least half as many bins are there.
        points: the first points.
    """

    def __init__(self, most: int, points: Iterable[tuple[float, float]] = ()) -> None:
        self._most = max(2, most)
        self._each = 1  # points in a full bin
        self.bins: list[Bin] = []
        for place, value in points:
            self.add(place, value)

    def add(self, place: float, value: float) -> None:
        """Add a point at the end. A value that is NaN or infinite is counted as missing."""
        point = Bin(place, place, 1, 0, value, value, value)
        if not math.isfinite(value):
            point = Bin(place, place, 1, 1, math.inf, -math.inf, 0.0)
        bins = self.bins
        if len(bins) == self._most and bins[-1].count == self._each:
            halves = range(0, len(bins) - 1, 2)
            odd = bins[-1:] if len(bins) % 2 else []
            self.bins = bins = [bins[i].join(bins[i + 1]) for i in halves] + odd
            self._each *= 2
        if bins and bins[-1].count < self._each:  # the odd one is a half, too
            bins[-1] = bins[-1].join(point)
        else:
            bins.append(point)

    @property
    def count(self) -> int:
        """Points so far."""
        return sum(each.count for each in self.bins)

    @property
    def missing(self) -> int:
        """Points that were NaN or infinite."""
        return sum(each.missing for each in self.bins)

    @property
    def low(self) -> float:
        """The lowest finite value; NaN when there is none."""
        return min((each.low for each in self.bins if each.missing < each.count), default=math.nan)

    @property
    def high(self) -> float:
        """The highest finite value; NaN when there is none."""
        return max((each.high for each in self.bins if each.missing < each.count), default=math.nan)

    def means(self, places: int) -> list[float]:
        """Return at most `places` means of neighbouring bins; NaN where nothing was finite."""
        groups = min(places, len(self.bins))
        bounds = [len(self.bins) * i // groups for i in range(groups + 1)] if groups else []
        means = []
        for begin, end in itertools.pairwise(bounds):
            bins = self.bins[begin:end]
            finite = sum(each.count - each.missing for each in bins)
            means.append(sum(each.total for each in bins) / finite if finite else math.nan)
        return means
