"""Time on a GPU: when its stream comes by a place, not when Python does.

Python queues kernels and runs ahead; its clock says nothing about how long they take. An event that is queued between
them does. A `Moment` is such an event; the time between two is known when the device has passed both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class DeviceClock:
    """Makes moments on the current stream of a device.

    Args:
        record: queues an event that keeps its time, on the current stream, and returns it: anything with the methods
            `query`, `synchronize` and `elapsed_time` of `torch.cuda.Event`.
    """

    def __init__(self, record: Callable[[], Any]) -> None:
        self._record = record

    def now(self) -> Moment:
        """The moment at which the device is done with what was queued so far. Does not wait for it."""
        return Moment(self._record())


class Moment:
    """A place in a device's stream."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def passed(self) -> bool:
        """Return whether the device has passed it."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Blocks until the device has passed it."""
        self._event.synchronize()

    def since(self, earlier: Moment) -> int:
        """Nanoseconds of the device from that moment to this one. Both must have passed."""
        return int(earlier._event.elapsed_time(self._event) * 1e6)


def clock_of(device: torch.device) -> DeviceClock | None:
    """The clock of a CUDA device; None for the CPU, where Python's own clock tells."""
    if device.type != "cuda":
        return None

    def record() -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return DeviceClock(record)
