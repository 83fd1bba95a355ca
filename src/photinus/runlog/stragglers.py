"""Find what limits a run: the rank that slows the others, a slow link, data, the exchange: pure functions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .tables import PHASES, Window, mean_window
from .units import percent

_RATIO = 1.15
_EXCESS_S = 0.5e-3  # less than that a step is noise of the machine
_LASTING = 0.6  # of the steps or windows: one long hiccup makes no straggler and no slow link
_SPREADS = 2.0  # by how many spreads of the windows' excesses a straggler lies above the others
_FEW_WINDOWS = 3  # fewer show no spread
_FEW_RATIO = 1.75  # and then it must be plain
_LINK_RATIO = 3.0
_LINK_EXCESS_S = 1e-3  # a step; less is the noise of a network
_MUCH = 0.2  # of a step: less is worth nobody's work
_WAITED = 0.5  # of the excess: what computation hides holds nobody up


@dataclass(frozen=True)
class RankShare:
    """The mean step of one rank over some windows.

    Attributes:
        rank: of the job.
        phases: seconds of a step by phase, in the order of PHASES.
        ratio: its own time (all but waiting) by the median rank's; 1.0 for a rank as fast as most.
    """

    rank: int
    phases: tuple[float, ...]
    ratio: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.phases)

    @property
    def own_s(self) -> float:
        """Seconds of a step in which it did not wait for others."""
        return self.step_s - self.phases[PHASES.index("waiting")]


@dataclass(frozen=True)
class Straggler:
    """A rank that others wait for.

    Attributes:
        rank: of the job.
        ratio: its own time by the median rank's.
        excess_s: seconds of a step that it takes more than the median rank.
        phase: in which phase most of that lies.
    """

    rank: int
    ratio: float
    excess_s: float
    phase: str


def shares(windows: Sequence[Window]) -> list[RankShare]:
    """The mean step of each rank over windows of one world size, each step counting the same; [] without windows."""
    if not windows:
        return []
    world_size = windows[-1].world_size
    mean = mean_window([window for window in windows if window.world_size == world_size])
    own = [mean.own_s(rank) for rank in range(world_size)]
    typical = _typical(own)
    return [
        RankShare(rank, tuple(mean.phases[phase][rank] for phase in PHASES), own_s / typical if typical > 0 else 1.0)
        for rank, own_s in enumerate(own)
    ]


def stragglers(windows: Sequence[Window]) -> list[Straggler]:
    """The ranks that hold the others up, the slowest first.

    Their own time lies 15 % and half a millisecond a step above the median rank's, in the mean of all windows, and
    half of that 15 % above it in windows of at least 60 % of the steps. And it is no noise: by how much it lies above
    is, in the median window, at least twice as much as it spreads from window to window (the median distance from
    that median, times 1.4826, which is the standard deviation of normal noise). Of one or two windows nobody knows
    the spread: there the rank has to take 1.75 times as long as the median rank.
    """
    ranks = shares(windows)
    if len(ranks) < 2:
        return []
    sample = [window for window in windows if window.world_size == len(ranks)]
    typical_s = _typical([rank.own_s for rank in ranks])
    usual = [_typical([rank.phases[i] for rank in ranks]) for i in range(len(PHASES))]
    found = []
    for rank in ranks:
        excess_s = rank.own_s - typical_s
        if rank.ratio < _RATIO or excess_s < _EXCESS_S:
            continue
        times = [(w.own_s(rank.rank), _typical([w.own_s(r) for r in range(len(ranks))]), w.steps) for w in sample]
        if _is_lasting(times) and _is_beyond_noise(times, rank.ratio):
            above = {p: rank.phases[i] - usual[i] for i, p in enumerate(PHASES) if p != "waiting"}
            found.append(Straggler(rank.rank, rank.ratio, excess_s, max(above, key=lambda phase: above[phase])))
    return sorted(found, key=lambda each: -each.excess_s)


def limit(windows: Sequence[Window]) -> str:
    """Return, in sentences, what limits the speed of a run and what would help; "" without times."""
    ranks = shares(windows)
    whole_s = sum(rank.step_s for rank in ranks)
    if not whole_s > 0:
        return ""
    part = {phase: sum(rank.phases[i] for rank in ranks) / whole_s for i, phase in enumerate(PHASES)}
    if part["data"] >= max(_MUCH, part["waiting"]):
        return (
            f"Data limits the speed: ranks wait for batches for {percent(part['data'])} of a step. Load them in more "
            f"workers (num_workers=), or do less for each sample."
        )
    if part["waiting"] >= _MUCH and not stragglers(windows):
        return (
            f"The exchange limits the speed: ranks wait for each other for {percent(part['waiting'])} of a step. A "
            f"larger batch for each rank or gradients accumulated over several batches make that smaller, and between "
            f"hosts wire_dtype=torch.bfloat16. `photinus doctor --model` shows how much."
        )
    if part["waiting"] >= _MUCH:
        return ""  # the slow rank is the cause
    return f"Computing limits the speed: it takes {percent(1 - part['data'] - part['waiting'])} of a step."


_Times = Sequence[tuple[float, float, int]]  # by window: a rank's own time of a step, the median rank's, and the steps


def _is_lasting(times: _Times) -> bool:
    slow = sum(steps for own_s, typical_s, steps in times if own_s > (1 + (_RATIO - 1) / 2) * typical_s)
    return slow >= _LASTING * sum(steps for *_, steps in times)


def _is_beyond_noise(times: _Times, ratio: float) -> bool:
    if len(times) < _FEW_WINDOWS:
        return ratio >= _FEW_RATIO
    excesses = [own_s - typical_s for own_s, typical_s, _ in times]
    usual = statistics.median(excesses)
    spread = 1.4826 * statistics.median(abs(excess - usual) for excess in excesses)
    return usual >= _SPREADS * spread


def _typical(values: Sequence[float]) -> float:
    """The median; of an even number of ranks the lower one, for with two ranks the slow one is not half typical."""
    return statistics.median_low(values)


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
    millisecond a step longer, and the ranks wait for at least half of that. Two hosts have a single
    link, so there is no usual one, and none is slow. The pair is returned that is the slowest in both of the newest two
    windows (one hiccup does not make a slow link), or in 60 % of all windows.

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
    cases = [each for each in found if each and each[0] == ends]
    return [SlowLink(cases[-1][1], statistics.median(each[2] for each in cases))]


_Slow = tuple[frozenset[object], tuple[int, int], float]


def _slowest(window: Window, hosts: Sequence[str]) -> _Slow | None:
    """The ends of the slowest link, if it is slow, the ranks there, and its excess."""
    links = [(rank, *link) for rank, link in enumerate(window.links) if link[0] >= 0]
    if not links:
        return None
    typical_s = statistics.median_low(usual_s for _, _, _, usual_s in links)
    rank, peer, seconds, _ = max(links, key=lambda each: each[2])
    excess_s = seconds - typical_s
    waiting_s = statistics.median(window.phases["waiting"])
    if seconds < _LINK_RATIO * typical_s or excess_s < _LINK_EXCESS_S or waiting_s < _WAITED * excess_s:
        return None
    ends = frozenset(hosts[each] if each < len(hosts) else each for each in (rank, peer))
    return ends, (min(rank, peer), max(rank, peer)), excess_s
