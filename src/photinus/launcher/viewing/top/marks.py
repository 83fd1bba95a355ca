"""Pictures out of characters: sparklines, progress bars, and bars of several parts."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["parts", "progress_bar", "sparkline"]

_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MISSING = "×"


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
    if not high > low:
        return "".join(_LEVELS[3] if math.isfinite(value) else _MISSING for value in values)
    top = len(_LEVELS) - 1
    return "".join(
        _LEVELS[round((value - low) / (high - low) * top)] if math.isfinite(value) else _MISSING for value in values
    )


def progress_bar(share: float, width: int) -> str:
    """A bar that is filled to `share` of its width, in eighths of a character."""
    share = min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
    eighths = int(share * width * 8)
    full, rest = divmod(eighths, 8)
    bar = "█" * full + (_EIGHTHS[rest] if rest else "")
    return bar + "░" * (width - len(bar))


def parts(shares: Sequence[float], width: int) -> list[int]:
    """How many characters of a bar each share gets, all together `width`; a share that is not 0 gets one if it can.

    By largest remainders, so that the lengths are as near to the shares as whole characters allow.
    """
    total = sum(shares)
    if not total > 0 or width <= 0:
        return [0] * len(shares)
    exact = [share / total * width for share in shares]
    lengths = [int(length) for length in exact]
    for index in sorted(range(len(shares)), key=lambda i: lengths[i] - exact[i])[: width - sum(lengths)]:
        lengths[index] += 1
    for index, share in enumerate(shares):
        longest = max(range(len(lengths)), key=lambda i: lengths[i])
        if share / total >= 0.005 and lengths[index] == 0 and lengths[longest] > 2:
            lengths[index] += 1
            lengths[longest] -= 1
    return lengths
