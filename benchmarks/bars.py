"""The bars: how fast all_reduce must be, as data, and which of them a run misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness import MIB, size_name

KIB = 1 << 10
BOTH = ("float32", "bfloat16")
GLOO, OPEN_MPI, MPICH, INTEL_MPI = "gloo", "Open MPI", "MPICH", "Intel MPI"
DEEPSPEED, LOOP, IMB = "DeepSpeed shm", "moving loop", "Intel MPI, IMB"


@dataclass(frozen=True)
class Bar:
    """One bar, for sizes from `low` to `high` bytes.

    Args:
        ours: our column.
        low, high: the sizes that it is for, in bytes.
        against: another column; its time divided by ours must be `at_least` (`above`: be more than).
        at_most_s: or: the seconds that ours may take at most.
        ranks: the number of ranks that it is for; 0 for any of more than one.
        dtypes: the element types that it is for.
    """

    ours: str
    low: int
    high: int
    against: str = ""
    at_least: float = 0.0
    above: float = 0.0
    at_most_s: float = 0.0
    ranks: int = 0
    dtypes: tuple[str, ...] = BOTH

    def is_for(self, row: dict[str, Any]) -> bool:
        """Whether it says something about this row."""
        fits = row["ranks"] == self.ranks if self.ranks else row["ranks"] > 1
        return fits and row["dtype"] in self.dtypes and self.low <= row["bytes"] <= self.high

    def verdict(self, row: dict[str, Any]) -> tuple[bool, str]:
        """Whether the row clears the bar, and a line about it."""
        seconds = row["seconds"]
        where = f"{row['ranks']} ranks, {row['dtype']}, {size_name(row['bytes'])}: {self.ours}"
        missing = [name for name in (self.ours, self.against) if name and name not in seconds]
        if missing:
            return False, f"{where}: {missing[0]} was not measured"
        own = seconds[self.ours]
        if self.at_most_s:
            return (
                own <= self.at_most_s,
                f"{where} takes {own * 1e6:.1f} us, at most {self.at_most_s * 1e6:g} us wanted",
            )
        ratio = seconds[self.against] / own
        wanted = f"at least {self.at_least:.3g} x" if self.at_least else f"more than {self.above:.3g} x"
        passed = ratio >= self.at_least if self.at_least else ratio > self.above
        return passed, f"{where} is {ratio:.2f} x as fast as {self.against}, {wanted} wanted"


ENGINES = (
    Bar("arena", MIB, 4 * MIB, GLOO, at_least=10, ranks=2, dtypes=("float32",)),
    Bar("arena", 16 * MIB, 256 * MIB, GLOO, at_least=6, ranks=2, dtypes=("float32",)),
    Bar("arena", MIB, 256 * MIB, GLOO, at_least=11, ranks=2, dtypes=("bfloat16",)),
    Bar("ordinary", MIB, 256 * MIB, GLOO, at_least=4, ranks=2),
    Bar("arena", 4 * KIB, 4 * KIB, at_most_s=3e-6, ranks=2),
    Bar("ordinary", 4 * KIB, 4 * KIB, at_most_s=3e-6, ranks=2),
    Bar("arena", MIB, 256 * MIB, GLOO, at_least=8, ranks=4),
    Bar("ordinary", MIB, 256 * MIB, GLOO, at_least=3, ranks=4),
    Bar("arena", 4 * KIB, 4 * KIB, at_most_s=40e-6, ranks=4),
    Bar("ordinary", 4 * KIB, 4 * KIB, at_most_s=40e-6, ranks=4),
    Bar("arena", 64 * MIB, 256 * MIB, LOOP, at_least=1 / 1.15),
    *(
        Bar(ours, 4 * KIB, 256 * MIB, rival, above=1, dtypes=dtypes)
        for rival, dtypes in ((OPEN_MPI, ("float32",)), (MPICH, ("float32",)), (DEEPSPEED, BOTH))
        for ours in ("arena", "ordinary")
    ),
)
"""The engine alone against everybody (all_reduce_engines.py)."""

TORCH = (
    *(Bar(ours, 0, 256 * MIB, GLOO, at_least=1) for ours in ("photinus", "photinus arena")),
    Bar("photinus", MIB, 16 * MIB, GLOO, at_least=3.5),
    Bar("photinus arena", MIB, 16 * MIB, GLOO, at_least=8),
    Bar("python layer", 4, 4, at_most_s=20e-6, ranks=1),
)
"""Through torch.distributed (all_reduce.py)."""

COMMITS = (
    *(Bar(ours, 4, 4, at_most_s=0.5e-6, ranks=2) for ours in ("arena", "ordinary")),
    *(Bar(ours, 4 * KIB, 4 * KIB, at_most_s=0.8e-6, ranks=2) for ours in ("arena", "ordinary")),
    Bar("torch", 4, 4 * KIB, at_most_s=4.5e-6, ranks=2),
    *(Bar(ours, 4, 64 * MIB, f"{ours}, before", at_least=0.97) for ours in ("arena", "ordinary", "torch")),
)
"""Now and at an older commit (all_reduce_commits.py); the times for two ranks that have a core each."""


def misses(bars: Sequence[Bar], rows: Sequence[dict[str, Any]]) -> tuple[list[str], int]:
    """A line for each bar that a row of this run misses, and how many were looked at."""
    verdicts = [bar.verdict(row) for row in rows for bar in bars if bar.is_for(row)]
    return [line for passed, line in verdicts if not passed], len(verdicts)


def report(bars: Sequence[Bar], rows: Sequence[dict[str, Any]]) -> tuple[bool, str]:
    """Whether all bars are cleared, and what to say about it."""
    missed, total = misses(bars, rows)
    head = f"Bars: {total - len(missed)} of {total} cleared" + ("." if not missed else "; missed:")
    return not missed, "\n".join([head, *(f"- {line}" for line in missed)])
