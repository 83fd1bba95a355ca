"""Which rank holds the others up, and in which phase: a pure function over one window or several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .windows import PHASES, Window, mean_window

_RATIO = 1.15
_EXCESS_S = 0.5e-3  # less than that a step is noise of the machine
_LASTING = 0.6  # of the steps: one long hiccup makes no straggler
_SPREADS = 2.0  # by how many spreads of the windows' excesses a straggler lies above the others
_FEW_WINDOWS = 3  # fewer show no spread
_FEW_RATIO = 1.75  # and then it must be plain


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
    chosen = [window for window in windows if window.world_size == len(ranks)]
    typical_s = _typical([rank.own_s for rank in ranks])
    usual = [_typical([rank.phases[i] for rank in ranks]) for i in range(len(PHASES))]
    found = []
    for rank in ranks:
        excess_s = rank.own_s - typical_s
        if rank.ratio < _RATIO or excess_s < _EXCESS_S:
            continue
        if _is_lasting(chosen, rank.rank) and _is_beyond_noise(chosen, rank):
            above = {p: rank.phases[i] - usual[i] for i, p in enumerate(PHASES) if p != "waiting"}
            found.append(Straggler(rank.rank, rank.ratio, excess_s, max(above, key=lambda phase: above[phase])))
    return sorted(found, key=lambda each: -each.excess_s)


def _is_lasting(windows: Sequence[Window], rank: int) -> bool:
    slow = sum(
        window.steps
        for window in windows
        if window.own_s(rank) > (1 + (_RATIO - 1) / 2) * _typical([window.own_s(r) for r in range(window.world_size)])
    )
    return slow >= _LASTING * sum(window.steps for window in windows)


def _is_beyond_noise(windows: Sequence[Window], rank: RankShare) -> bool:
    if len(windows) < _FEW_WINDOWS:
        return rank.ratio >= _FEW_RATIO
    excesses = [w.own_s(rank.rank) - _typical([w.own_s(r) for r in range(w.world_size)]) for w in windows]
    usual = statistics.median(excesses)
    spread = 1.4826 * statistics.median(abs(excess - usual) for excess in excesses)
    return usual >= _SPREADS * spread


def _typical(values: Sequence[float]) -> float:
    """The median; of an even number of ranks the lower one, for with two ranks the slow one is not half typical."""
    return statistics.median_low(values)
