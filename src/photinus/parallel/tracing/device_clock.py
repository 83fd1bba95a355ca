"""Time on a GPU: when its stream comes by a place, not when Python does.

Python queues kernels and runs ahead; its clock says nothing about how long they take. An event that is queued between
them does. A `Moment` is such an event; what lies between two is known once the device has come by both.
"""

from __future__ import annotations

import time
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
        self._base: tuple[Any, int] | None = None

    def now(self) -> Moment:
        """The moment at which the device is done with what was queued so far. Does not wait for it."""
        return Moment(self._record(), self._base)

    def align(self) -> None:
        """Moments made from now on know their place on the host's clock (`ns_of`). Waits for the device, once.

        To be called anew before each measurement: events tell spans in float32, to 0.1 us after 1 s, 8 us after 100 s.
        """
        event = self._record()
        event.synchronize()
        self._base = (event, time.perf_counter_ns())


class Moment:
    """A place in a device's stream."""

    __slots__ = ("_base", "_event")

    def __init__(self, event: Any, base: tuple[Any, int] | None) -> None:
        self._event = event
        self._base = base

    @property
    def passed(self) -> bool:
        """Return whether the device has passed it."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Blocks until the device has come by."""
        self._event.synchronize()

    def since(self, earlier: Moment) -> int:
        """Nanoseconds of the device from that moment to this one. Both must have passed."""
        return int(earlier._event.elapsed_time(self._event) * 1e6)

    def ns(self) -> int:
        """This moment on the clock of `time.perf_counter_ns`. Passed it must have, its clock been aligned before."""
        assert self._base is not None, "DeviceClock.align comes first"
        event, host_ns = self._base
        return host_ns + int(event.elapsed_time(self._event) * 1e6)


def clock_of(device: torch.device) -> DeviceClock | None:
    """The clock of a CUDA device; None for the CPU, where Python's own clock tells."""
    if device.type != "cuda":
        return None

    def record() -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return DeviceClock(record)


def is_past(moment: int | Moment) -> bool:
    """Return whether a moment of either kind has passed: one of the host's clock always has."""
    return isinstance(moment, int) or moment.passed


def ns_of(moment: int | Moment) -> int:
    """A moment of either kind on the clock of `time.perf_counter_ns`."""
    return moment if isinstance(moment, int) else moment.ns()
