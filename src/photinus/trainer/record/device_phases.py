"""The phases of training steps on a GPU's own time: what its stream did between two marks, told by events.

A phase's kernels may run long after Python has queued them, and a wait for nccl is one of the stream's alone. So each
mark and each end of a wait is an event on the stream, and the times are read a few steps later, when all has come by.
Time in which the device had nothing to do counts for the phase that let it wait: a slow loader shows as "data", and as
nothing where the device still had work.
"""

from __future__ import annotations

from collections.abc import MutableSequence

from ...parallel.tracing.device_clock import DeviceClock, Moment


class DevicePhases:
    """Marks of one rank's steps; `waiting_time` tells it of waits for other ranks."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._unread: list[tuple[int, Moment, Moment, list[tuple[Moment, Moment]], int]] = []
        self.skip()

    def skip(self) -> None:
        """What has happened since the last mark is no part of a step."""
        self._last = self._clock.now()
        self._waits: list[tuple[Moment, Moment]] = []
        self._inside = 0
        self._wait_began: Moment | None = None

    def mark(self, phase: int, aside_ns: int) -> None:
        """Books the time since the last mark, less `aside_ns` and waits, under a phase."""
        now = self._clock.now()
        self._unread.append((phase, self._last, now, self._waits, aside_ns))
        self._last, self._waits, self._inside = now, [], 0

    def wait_began(self) -> None:
        """A wait for other ranks begins; one inside another counts once."""
        self._inside += 1
        if self._inside == 1:
            self._wait_began = self._clock.now()

    def wait_ended(self) -> None:
        """It is over."""
        self._inside -= 1
        if self._inside == 0 and self._wait_began is not None:
            self._waits.append((self._wait_began, self._clock.now()))

    def take(self, ns: MutableSequence[int], waiting: int) -> None:
        """Adds what was marked to `ns`, by phase, waits under the phase `waiting`. Waits for the device's last mark."""
        if self._unread:
            self._unread[-1][2].wait()
        for phase, began, ended, waits, aside_ns in self._unread:
            elapsed = max(0, ended.since(began) - aside_ns)
            waited = min(elapsed, sum(end.since(begin) for begin, end in waits))
            ns[phase] += elapsed - waited
            ns[waiting] += waited
        self._unread.clear()
