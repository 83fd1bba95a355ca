"""Workers that suspend themselves: what one tells its launcher about that, and the words for those that did.

A worker whose loop takes SIGTERM and SIGUSR1 (`photinus.Loop`, `photinus.preemption`) finishes its step, saves, and
leaves by the exception `Suspended`, recorded like any other. That it would, it has told before (see status.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from .report import Death

__all__ = ["ended_suspended", "saved", "tell_suspension"]


def ended_suspended(deaths: Sequence[Death]) -> bool:
    """Whether these are the ends of workers that suspended themselves, and no failure."""
    return any(death.suspended for death in deaths) and all(death.suspended or death.ended_by_us for death in deaths)


def saved(deaths: Sequence[Death]) -> str:
    """What suspended workers say that they saved: `step 120, saved in PATH`; of the first rank that says something."""
    said = [death.raised.text for death in sorted(deaths, key=lambda d: d.rank) if death.suspended and death.raised]
    return next((text for text in said if text), "")


def tell_suspension(deaths: Sequence[Death], *, world_size: int, delay_s: float) -> str:
    """The words for the terminal when all workers have suspended themselves and are started again."""
    words = saved(deaths)
    soon = f" in {delay_s:.0f} s" if delay_s else ""
    workers = f"all {world_size} workers" if world_size > 1 else "the worker"
    return (
        f"photinus: suspended{f' at {words}' if words else ''}\n"
        f"photinus: starting {workers} again from there{soon} (no failure, and not counted as one)\n"
    )
