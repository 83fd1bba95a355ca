"""Workers that suspend themselves: what one tells its launcher about that, and the words for those that did.

A worker whose loop takes SIGTERM and SIGUSR1 (`photinus.Loop`, `photinus.suspend_requested`) finishes its step, saves,
and leaves by the exception `Suspended`, recorded like any other. That it would, it has told before (see status.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from .failures import Death, Raised

__all__ = ["ended_suspended", "tell_suspension", "words_of"]


def ended_suspended(deaths: Sequence[Death]) -> bool:
    """Whether these are the ends of workers that suspended themselves, and no failure."""
    return any(death.suspended for death in deaths) and all(death.suspended or death.ended_by_us for death in deaths)


def words_of(suspensions: Sequence[Raised]) -> str:
    """`suspended at step 120, saved in PATH`: what the first worker says that says something."""
    said = next((raised.text for raised in suspensions if raised.text), "")
    return f"suspended at {said}" if said else "suspended"


def tell_suspension(deaths: Sequence[Death], *, world_size: int, delay_s: float) -> str:
    """The words for the terminal when all workers have suspended themselves and are started again."""
    words = words_of(
        [death.raised for death in sorted(deaths, key=lambda d: d.rank) if death.raised and death.suspended]
    )
    soon = f" in {delay_s:.0f} s" if delay_s else ""
    workers = f"all {world_size} workers" if world_size > 1 else "the worker"
    return (
        f"photinus: {words}\nphotinus: starting {workers} again from there{soon} (no failure, and not counted as one)\n"
    )
