"""The spans of this process that a trace is drawn from.

A recording is switched on for the whole process (`photinus.trace` does so). While there is none, whoever could add to
it pays for one comparison with None.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .device_clock import DeviceClock, Moment, is_past, ns_of

MAIN = "training"
EXCHANGE = "exchange"


@dataclass(frozen=True)
class Span:
    """Something that lasted.

    Attributes:
        name: what it was, such as "forward", or "bucket 3".
        lane: what ran it: MAIN (the thread that trains) or EXCHANGE.
        begin_ns, end_ns: on the clock of `time.perf_counter_ns`, monotonic and the same for all processes of a host;
            of what a GPU did, when the GPU did it.
        step: number of the exchanged backward that it belongs to, from 0.
        facts: more about it, shown when a viewer selects it.
    """

    name: str
    lane: str
    begin_ns: int
    end_ns: int
    step: int
    facts: Mapping[str, Any] = field(default_factory=dict)


class Recording:
    """Collects spans from the trainer's thread and from whatever thread sees an exchange end.

    Args:
        skip: so many steps are left out at first.
        steps: and after these no more are kept; None: all.
    """

    def __init__(self, *, skip: int = 0, steps: int | None = None) -> None:
        self._skip = skip
        self._end = None if steps is None else skip + steps
        self._spans: list[tuple[str, str, int | Moment, int | Moment, int, Mapping[str, Any]]] = []
        self._clock: DeviceClock | None = None
        self._changed = threading.Condition()
        self._under_way = 0
        self.step = -1

    def begin_step(self) -> None:
        """A forward that an exchange will follow begins; the step lasts until the next one."""
        self.step += 1

    def wants(self, step: int) -> bool:
        """Return whether the spans of this step are kept."""
        return step >= self._skip and (self._end is None or step < self._end)

    def use_clock(self, clock: DeviceClock | None) -> None:
        """The model computes on a device with such a clock: from now on moments are that device's."""
        if clock is not None and clock is not self._clock:
            clock.align()
            self._clock = clock

    def now(self) -> int | Moment:
        """The present moment, to begin or end a span with."""
        return time.perf_counter_ns() if self._clock is None else self._clock.now()

    def add(
        self,
        name: str,
        lane: str,
        begin: int | Moment,
        end: int | Moment,
        *,
        step: int | None = None,
        **facts: Any,
    ) -> None:
        """Adds a span of the running step, or of an earlier one. 0 as its beginning: nothing has begun."""
        step = self.step if step is None else step
        if begin and self.wants(step):
            with self._changed:
                self._spans.append((name, lane, begin, end, step, facts))

    def add_exchange(self, name: str, begin: int | Moment, work: Any, **facts: Any) -> bool:
        """Adds an exchange of the running step when `work` has ended; False when that can not be told."""
        step = self.step

        def note_end(_: object) -> None:
            # A work on a GPU calls this at once, on a stream that has to wait for the work's end.
            self.add(name, EXCHANGE, begin, self.now(), step=step, **facts)
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

        try:
            future = work if hasattr(work, "add_done_callback") else work.get_future()
        except (AttributeError, RuntimeError):  # a work of ours around another, or a backend without futures for it
            return False
        with self._changed:
            self._under_way += 1
        future.add_done_callback(note_end)
        return True

    def settle(self, timeout_s: float) -> None:
        """Waits until the ends of all exchanges are known: other threads see them a little after the waiter."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way == 0, timeout_s)

    def spans(self, *, wait: bool = True) -> list[Span]:
        """All spans so far, in the order of their beginnings.

        Without `wait` those are left out that a device has not come by: after an error it may never.
        """
        with self._changed:
            records = list(self._spans)
        spans = []
        for name, lane, begin, end, step, facts in records:
            for moment in (begin, end):
                if wait and not isinstance(moment, int):
                    moment.wait()
            if not (is_past(begin) and is_past(end)):
                continue
            begin_ns, end_ns = ns_of(begin), ns_of(end)
            if end_ns >= begin_ns:
                spans.append(Span(name, lane, begin_ns, end_ns, step, facts))
        return sorted(spans, key=lambda span: span.begin_ns)


_current: Recording | None = None


def current_recording(*, any_step: bool = False) -> Recording | None:
    """The recording that is switched on, if it wants the running step (or with `any_step`, in any case)."""
    return _current if _current is not None and (any_step or _current.wants(_current.step)) else None


def set_current_recording(recording: Recording | None) -> None:
    """Switches a recording on; None switches it off."""
    global _current
    _current = recording


@contextmanager
def recorded_span(name: str, **facts: Any) -> Iterator[None]:
    """Whatever runs inside becomes a span of the thread that trains, if a recording is on."""
    recording = current_recording()
    begin = 0 if recording is None else recording.now()
    try:
        yield
    finally:
        if recording is not None:
            recording.add(name, MAIN, begin, recording.now(), **facts)
