"""Splits each training step of this rank into phases, with a few readings of the clock.

The loop says what has just ended: `mark("forward")` books the time since the mark before under "forward", but for what
the thread waited for other ranks meanwhile, which is booked under "waiting". So the phases are together the whole step.

On a GPU the device's time is split, not Python's: see `photinus.trainer.record.device_phases`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...parallel.tracing.device_clock import DeviceClock, clock_of
from ...runlog.windows import PHASES
from ...waiting_time import waiting_time
from ..session.session import Session
from .device_phases import DevicePhases

_DATA, _FORWARD, _BACKWARD, _WAITING, _OPTIMIZER, _OTHER = range(len(PHASES))


class StepClock:
    """The phases of the steps of one loop. Runs between `start` and `stop`; at other times every call does nothing.

    Args:
        session: its work beside training (validation) is left out.
        device_clock: of the device; default: that of the session's.
    """

    def __init__(self, session: Session, device_clock: DeviceClock | None = None) -> None:
        self._session = session
        self._device_clock = device_clock or clock_of(session.device)
        self._device: DevicePhases | None = None  # while steps run on a GPU
        self._ns = [0] * len(PHASES)
        self._running = False
        self._last_ns = self._waited_ns = 0
        self._aside_s = 0.0
        self._inside = 0  # of backwards, clippings and optimizer steps: what happens inside one is part of it
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Steps begin."""
        self._running = True
        self._inside = 0
        if self._device_clock is not None:
            self._device = DevicePhases(self._device_clock)
        waiting_time.start(self._device)
        self._hooks = [
            register_optimizer_step_pre_hook(self.optimizing_began),
            register_optimizer_step_post_hook(self.optimizing_ended),
        ]
        self.skip()

    def stop(self) -> None:
        """Steps are over. May be called again."""
        if self._running:
            self._running = False
            waiting_time.stop()
            for hook in self._hooks:
                hook.remove()

    def skip(self) -> None:
        """What has happened since the last mark is no part of a step (a checkpoint was saved)."""
        self._last_ns, self._waited_ns = time.perf_counter_ns(), waiting_time.total_ns
        self._aside_s = self._session.aside_s
        if self._device is not None:
            self._device.skip()

    def data_came(self) -> None:
        """The loader has given the next batch; before that, the loop did other things (`other_ended`)."""
        self._inside = 0  # should the body before have been cut off
        self._mark(_DATA)

    def other_ended(self) -> None:
        """All else that is done between phases is over."""
        self._mark(_OTHER)

    def backward_began(self) -> None:
        """What came before it was the forward, and whatever else the loss needed."""
        self._inside += 1
        self._mark(_FORWARD)  # inside an optimizer's step too, whose closure calls backward

    def backward_ended(self) -> None:
        """Gradients are there, averages too."""
        self._mark(_BACKWARD)
        self._inside -= 1

    def optimizing_began(self, *_: Any) -> None:
        """Clipping, or an optimizer's step, begins."""
        self._inside += 1
        if self._inside == 1:
            self._mark(_OTHER)

    def optimizing_ended(self, *_: Any) -> None:
        """It is over."""
        self._inside -= 1
        if self._inside == 0:
            self._mark(_OPTIMIZER)

    def take(self) -> Sequence[float]:
        """Seconds in each phase since the last time this was called, in the order of PHASES.

        On a GPU this waits for the last mark, as does whoever reads the losses of these steps.
        """
        if self._device is not None:
            self._device.take(self._ns, _WAITING)
        taken, self._ns = self._ns, [0] * len(PHASES)
        return [ns / 1e9 for ns in taken]

    def _mark(self, phase: int) -> None:
        if not self._running:
            return
        now_ns, waited_ns, aside_s = time.perf_counter_ns(), waiting_time.total_ns, self._session.aside_s
        if self._device is not None:
            self._device.mark(phase, int((aside_s - self._aside_s) * 1e9))
            self._aside_s = aside_s
            return
        elapsed_ns = now_ns - self._last_ns
        if aside_s != self._aside_s:
            elapsed_ns = max(0, elapsed_ns - int((aside_s - self._aside_s) * 1e9))
            self._aside_s = aside_s
        waiting_ns = min(waited_ns - self._waited_ns, elapsed_ns)
        self._ns[phase] += elapsed_ns - waiting_ns
        self._ns[_WAITING] += waiting_ns
        self._last_ns, self._waited_ns = now_ns, waited_ns
