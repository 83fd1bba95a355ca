"""How long the thread that trains has waited for other ranks: a clock that a training loop switches on.

Whoever blocks in an exchange adds to it, at every floor: a wait of the backend's inside a wait of DDP's counts once.
While nobody measures, a wait pays for one look at `waiting_time.on`.

    began = waiting_time.begin() if waiting_time.on else 0
    work.wait()
    if began:
        waiting_time.end(began)
"""

from __future__ import annotations

import time
from threading import get_ident

__all__ = ["WaitingTime", "waiting_time"]


class WaitingTime:
    """Adds up the waits of one thread.

    Attributes:
        on: how many loops measure; 0 while nobody does.
        total_ns: nanoseconds waited since the process began to measure.
    """

    __slots__ = ("_thread", "on", "total_ns")

    def __init__(self) -> None:
        self.on = 0
        self.total_ns = 0
        self._thread = 0

    def start(self) -> None:
        """From now on the waits of the calling thread are counted."""
        self._thread = get_ident()
        self.on += 1

    def stop(self) -> None:
        """Ends what `start` began."""
        self.on = max(0, self.on - 1)

    def begin(self) -> int:
        """A wait begins. What is returned goes to `end`; 0 (nothing to end) on a thread that is not measured."""
        # The beginning, less what was counted before: `end` then counts what lies inside it, other waits too, once.
        return time.perf_counter_ns() - self.total_ns if get_ident() == self._thread else 0

    def end(self, began: int) -> None:
        """The wait that began then is over. A wait that raised need not be ended; it is not counted."""
        self.total_ns = time.perf_counter_ns() - began


waiting_time = WaitingTime()
"""That of this process."""
