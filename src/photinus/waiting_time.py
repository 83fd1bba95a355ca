"""The time that a training process waits for other ranks.

Whoever blocks in an exchange adds to `waiting_time`, at every floor: a wait of the backend's inside a wait of DDP's
counts once. While nobody measures, a wait pays for one look at `waiting_time.on`.

    began = waiting_time.begin() if waiting_time.on else 0
    work.wait()
    if began:
        waiting_time.end(began)
"""

from __future__ import annotations

import time
from threading import get_ident
from typing import Protocol


class DeviceWaits(Protocol):
    """An object that times waits in a device's stream, where Python does not wait."""

    def wait_began(self) -> None:
        """Note that work queued from now on waits for other ranks."""

    def wait_ended(self) -> None:
        """Note that work queued from now on does not."""


class WaitingTime:
    """A clock of one thread's waits, and of those that work for it meanwhile; a loop switches it on.

    Attributes:
        on: how many loops measure; 0 while nobody does.
        total_ns: nanoseconds waited since the process began to measure.
    """

    __slots__ = ("_device", "_threads", "on", "total_ns")

    def __init__(self) -> None:
        self.on = 0
        self.total_ns = 0
        self._threads: set[int] = set()
        self._device: DeviceWaits | None = None

    def start(self, device: DeviceWaits | None = None) -> None:
        """From now on the waits of the calling thread are counted, and told to `device`."""
        self._threads = {get_ident()}
        self._device = device
        self.on += 1

    def stop(self) -> None:
        """Ends what `start` began."""
        self.on = max(0, self.on - 1)
        self._device = None

    def lend_thread(self) -> None:
        """The calling thread works for the measured one: autograd's, which runs the backward of a GPU."""
        self._threads.add(get_ident())

    def begin(self) -> int:
        """A wait begins. What is returned goes to `end`; 0 (nothing to end) on a thread that is not measured."""
        if get_ident() not in self._threads:
            return 0
        if self._device is not None:
            self._device.wait_began()
        # The beginning, less what was counted before: `end` then counts what lies inside it, other waits too, once.
        return time.perf_counter_ns() - self.total_ns

    def end(self, began: int) -> None:
        """The wait that began then is over. A wait that raised need not be ended; it is not counted."""
        if self._device is not None:
            self._device.wait_ended()
        self.total_ns = time.perf_counter_ns() - began


waiting_time = WaitingTime()
"""That of this process."""
