"""Which link between two hosts holds all ranks up, rather than a rank: a pure function over some windows."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .windows import Window

_RATIO = 3.0
_EXCESS_S = 1e-3  # a step; less is the noise of a network
_WAITED = 0.5  # of the excess: what computation hides holds nobody up
_LASTING = 0.6  # of the windows


@dataclass(frozen=True)
class SlowLink:
    """A link that others wait for.

    Attributes:
        ranks: at its two ends, the lower one first.
        excess_s: seconds of a step that bytes are under way on it beyond those of a usual link.
    """

    ranks: tuple[int, int]
    excess_s: float

    def text(self, hosts: Sequence[str], time: str) -> str:
        """Like "host b ↔ c: 103 ms a step, network, not compute"."""
        ends = sorted(hosts[rank] if rank < len(hosts) else f"of rank {rank}" for rank in self.ranks)
        return f"host {ends[0]} ↔ {ends[1]}: {time} a step, network, not compute"


def slow_links(windows: Sequence[Window], hosts: Sequence[str] = ()) -> list[SlowLink]:
    """The pair of hosts whose link is slow, if there is one.

    In a window a link is slow when its bytes are under way three times as long as those of the median link, and a
    millisecond a step longer, and the ranks wait for at least half of that. Of hosts with one link each none is the
    usual one, so two hosts have no slow link here. Named is the pair that is the slowest in both of the newest two
    windows (one hiccup is no slow link), or in 60 % of them all.

    Args:
        windows: of one start, in their order.
        hosts: by rank; ranks of one host share its links.
    """
    found = [_slowest(window, hosts) for window in windows]
    newest = found[-2:]
    counts = Counter(each[0] for each in found if each)
    if len(newest) < 2:
        return []
    if all(newest) and len({each[0] for each in newest if each}) == 1:
        ends = newest[0][0] if newest[0] else frozenset()
    elif counts and counts.most_common(1)[0][1] >= max(2.0, _LASTING * len(found)):
        ends = counts.most_common(1)[0][0]
    else:
        return []
    named = [each for each in found if each and each[0] == ends]
    return [SlowLink(named[-1][1], statistics.median(each[2] for each in named))]


_Slow = tuple[frozenset[object], tuple[int, int], float]


def _slowest(window: Window, hosts: Sequence[str]) -> _Slow | None:
    """The ends of the slowest link, if it is slow, the ranks there, and its excess."""
    known = [(rank, *link) for rank, link in enumerate(window.links) if link[0] >= 0]
    if not known:
        return None
    typical_s = statistics.median_low(usual_s for _, _, _, usual_s in known)
    rank, peer, seconds, _ = max(known, key=lambda each: each[2])
    excess_s = seconds - typical_s
    waiting_s = statistics.median(window.phases["waiting"])
    if seconds < _RATIO * typical_s or excess_s < _EXCESS_S or waiting_s < _WAITED * excess_s:
        return None
    ends = frozenset(hosts[each] if each < len(hosts) else each for each in (rank, peer))
    return ends, (min(rank, peer), max(rank, peer)), excess_s
