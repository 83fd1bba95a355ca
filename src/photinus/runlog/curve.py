"""A curve of any number of points in a bounded number of buckets, that hides no extreme.

Each bucket keeps the lowest, the highest and the mean of its values, and how many of them were no numbers. When there
are too many buckets, neighbours are put together in pairs; so points can come one by one, without an end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bucket:
    """Some neighbouring points of a curve.

    Attributes:
        first, last: place of the first and the last of them.
        count: how many points.
        missing: how many of them were NaN or infinite.
        low, high: the lowest and the highest of the finite ones; inf and -inf when there is none.
        total: sum of the finite ones.
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

    def join(self, other: Bucket) -> Bucket:
        """This bucket and the one that follows, as one."""
        return Bucket(
            self.first,
            other.last,
            self.count + other.count,
            self.missing + other.missing,
            min(self.low, other.low),
            max(self.high, other.high),
            self.total + other.total,
        )


class Curve:
    """Points in the order of their places, as at most `most` buckets of equally many points each (the last of fewer).

    Args:
        most: buckets, at least 2; there are at least half as many once there were more points than that.
        points: to begin with.
    """

    def __init__(self, most: int, points: Iterable[tuple[float, float]] = ()) -> None:
        self._most = max(2, most)
        self._each = 1  # points in a full bucket
        self.buckets: list[Bucket] = []
        for place, value in points:
            self.add(place, value)

    def add(self, place: float, value: float) -> None:
        """Adds a point at the end. A value that is NaN or infinite is counted as missing."""
        point = Bucket(place, place, 1, 0, value, value, value)
        if not math.isfinite(value):
            point = Bucket(place, place, 1, 1, math.inf, -math.inf, 0.0)
        buckets = self.buckets
        if len(buckets) == self._most and buckets[-1].count == self._each:
            halves = range(0, len(buckets) - 1, 2)
            odd = buckets[-1:] if len(buckets) % 2 else []
            self.buckets = buckets = [buckets[i].join(buckets[i + 1]) for i in halves] + odd
            self._each *= 2
        if buckets and buckets[-1].count < self._each:  # the odd one is a half, too
            buckets[-1] = buckets[-1].join(point)
        else:
            buckets.append(point)

    @property
    def count(self) -> int:
        """Points so far."""
        return sum(bucket.count for bucket in self.buckets)

    @property
    def missing(self) -> int:
        """Points that were NaN or infinite."""
        return sum(bucket.missing for bucket in self.buckets)

    @property
    def low(self) -> float:
        """The lowest finite value; NaN when there is none."""
        return min((bucket.low for bucket in self.buckets if bucket.missing < bucket.count), default=math.nan)

    @property
    def high(self) -> float:
        """The highest finite value; NaN when there is none."""
        return max((bucket.high for bucket in self.buckets if bucket.missing < bucket.count), default=math.nan)

    def means(self, places: int) -> list[float]:
        """The means of at most so many runs of neighbouring buckets of like length; NaN where nothing was finite."""
        groups = min(places, len(self.buckets))
        bounds = [len(self.buckets) * i // groups for i in range(groups + 1)] if groups else []
        means = []
        for begin, end in itertools.pairwise(bounds):
            buckets = self.buckets[begin:end]
            finite = sum(bucket.count - bucket.missing for bucket in buckets)
            means.append(sum(bucket.total for bucket in buckets) / finite if finite else math.nan)
        return means
