"""Splits each training step of this rank into phases, with a few readings of the clock.

The loop says what has just ended: `mark("forward")` books the time since the mark before under "forward", but for what
the thread waited for other ranks meanwhile, which is booked under "waiting". So the phases are together the whole step.

On a GPU the device's time is split, not Python's. A phase's kernels may run long after Python has queued them, and a
wait for nccl is one of the stream's alone. So each mark and each end of a wait is an event on the stream, and the times
are read a few steps later, when all has come by. Time in which the device had nothing to do counts for the phase that
let it wait: a slow loader shows as "data", and as nothing where the device still had work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.optim import Optimizer

from ...optimizer_steps import StepWatcher, unwatch_steps, watch_steps
from ...parallel.tracing.device_clock import DeviceClock, Moment, clock_of
from ...runlog.tables import PHASES
from ...waiting_time import waiting_time
from ..session.session import Session

_DATA, _FORWARD, _BACKWARD, _WAITING, _OPTIMIZER, _OTHER = range(len(PHASES))


class StepClock(StepWatcher):
    """The phases of the steps of one loop. Runs between `start` and `stop`; at other times every call does nothing.

    Args:
        session: its work beside training (validation) is left out.
        device_clock: of the device; default: that of the session's.
    """

    def __init__(self, session: Session, device_clock: DeviceClock | None = None) -> None:
        self._session = session
        self._device_clock = device_clock or clock_of(session.device)
        # On a GPU: phase, its two ends, the waits inside, and work beside training, of all that is not yet in `_ns`.
        self._unread: list[tuple[int, Moment, Moment, list[tuple[Moment, Moment]], int]] = []
        self._waits: list[tuple[Moment, Moment]] = []  # since the last mark
        self._ns = [0] * len(PHASES)
        self._running = False
        self._aside_s = 0.0
        self._inside = 0  # of backwards, clippings and optimizer steps: what happens inside one is part of it

    def start(self) -> None:
        """Steps begin."""
        self._running = True
        self._inside = 0
        self._unread.clear()
        waiting_time.start(self if self._device_clock is not None else None)
        watch_steps(self)
        self.skip()

    def stop(self) -> None:
        """Steps are over. May be called again."""
        if self._running:
            self._running = False
            waiting_time.stop()
            unwatch_steps(self)

    def skip(self) -> None:
        """Leave the time since the last mark out of the step (a checkpoint was saved)."""
        self._last_ns, self._waited_ns = time.perf_counter_ns(), waiting_time.total_ns
        self._aside_s = self._session.aside_s
        if self._device_clock is not None:
            self._last, self._waits, self._waits_inside = self._device_clock.now(), [], 0

    def wait_began(self) -> None:
        """A wait of the GPU's stream for other ranks begins; one inside another counts once. See `waiting_time`."""
        self._waits_inside += 1
        if self._waits_inside == 1 and self._device_clock is not None:
            self._wait_began = self._device_clock.now()

    def wait_ended(self) -> None:
        """It is over."""
        self._waits_inside -= 1
        if self._waits_inside == 0 and self._device_clock is not None:
            self._waits.append((self._wait_began, self._device_clock.now()))

    def data_came(self) -> None:
        """The loader has given the next batch; before that, the loop did other things (`other_ended`)."""
        self._inside = 0  # should the body before have been cut off
        self._mark(_DATA)

    def other_ended(self) -> None:
        """All else that is done between phases is over."""
        self._mark(_OTHER)

    def backward_began(self) -> None:
        """Count the time before it as the forward, and as what else the loss needed."""
        self._inside += 1
        self._mark(_FORWARD)  # inside an optimizer's step too, whose closure calls backward

    def backward_ended(self) -> None:
        """Gradients are there, averages too."""
        self._mark(_BACKWARD)
        self._inside -= 1

    def step_began(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """See `StepWatcher`."""
        self.optimizing_began()

    def step_ended(self, optimizer: Optimizer) -> None:
        """See `StepWatcher`."""
        self.optimizing_ended()

    def optimizing_began(self) -> None:
        """Clipping, or an optimizer's step, begins."""
        self._inside += 1
        if self._inside == 1:
            self._mark(_OTHER)

    def optimizing_ended(self) -> None:
        """It is over."""
        self._inside -= 1
        if self._inside == 0:
            self._mark(_OPTIMIZER)

    def take(self) -> Sequence[float]:
        """Seconds in each phase since the last time this was called, in the order of PHASES.

        On a GPU this waits for the last mark, as does whoever reads the losses of these steps.
        """
        if self._unread:
            self._unread[-1][2].wait()
        for phase, began, ended, waits, aside_ns in self._unread:
            self._book(phase, ended.since(began) - aside_ns, sum(end.since(begin) for begin, end in waits))
        self._unread.clear()
        taken, self._ns = self._ns, [0] * len(PHASES)
        return [ns / 1e9 for ns in taken]

    def _mark(self, phase: int) -> None:
        if not self._running:
            return
        now_ns, waited_ns, aside_s = time.perf_counter_ns(), waiting_time.total_ns, self._session.aside_s
        aside_ns = 0 if aside_s == self._aside_s else int((aside_s - self._aside_s) * 1e9)
        if self._device_clock is not None:
            now = self._device_clock.now()
            self._unread.append((phase, self._last, now, self._waits, aside_ns))
            self._last, self._waits, self._waits_inside = now, [], 0
        elif aside_ns or waited_ns != self._waited_ns:
            self._book(phase, now_ns - self._last_ns - aside_ns, waited_ns - self._waited_ns)
        else:
            self._ns[phase] += now_ns - self._last_ns
        self._last_ns, self._waited_ns, self._aside_s = now_ns, waited_ns, aside_s

    def _book(self, phase: int, elapsed_ns: int, waited_ns: int) -> None:
        elapsed_ns = max(0, elapsed_ns)
        waited_ns = min(waited_ns, elapsed_ns)
        self._ns[phase] += elapsed_ns - waited_ns
        self._ns[_WAITING] += waited_ns
