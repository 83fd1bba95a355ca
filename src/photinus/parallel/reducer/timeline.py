"""When forward, backward and exchange of each iteration began and ended, as this process saw it.

Always kept, for it costs a few readings of the clock; while a recording is on (`photinus.trace`), it gets the spans. On
a GPU the moments are the device's own (`parallel.tracing.device_clock`); iterations that nobody looks at have none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ..exchange.tensors import tensors_in
from ..tracing.device_clock import DeviceClock, Moment, is_past, ns_of
from ..tracing.recording import EXCHANGE, MAIN, current_recording
from .gradient_memory import Bucket

# As torch's class samples, whose names `last` and `averages` have.
_ALWAYS_SAMPLED = 10


@dataclass
class Timeline:
    """Times in nanoseconds of one clock. An iteration is a forward that is followed by an exchange, and what follows.

    Attributes:
        device_clock: of the model's device; None: the host's clock tells.
        sample_rate: after the first ten iterations, every so many are kept.
        iteration: number of the last one that was kept (0 is the first).
        last: durations and beginnings of that one, by name.
        averages: mean durations over all that were kept.
        buckets_exchanged: in the last backward.
        error: text of the last error, "" if there was none.
    """

    device_clock: DeviceClock | None = None
    sample_rate: int = 100
    iteration: int = 0
    last: dict[str, int] = field(default_factory=dict)
    averages: dict[str, int] = field(default_factory=dict)
    buckets_exchanged: int = 0
    error: str = ""
    _iterations: int = 0
    _samples: int = 0
    _measures: bool = True
    _unread: list[tuple[int, tuple[int | Moment, ...]]] = field(default_factory=list)
    _forward: int | Moment = 0
    _outputs_reached: int = -1  # the last recorded step in which backward came by the model's outputs
    _backward: int | Moment = 0
    _backward_end: int | Moment = 0
    _exchange: int | Moment = 0
    _exchange_end: int | Moment = 0
    _unstamped: list[tuple[str, int | Moment, dict[str, Any]]] = field(default_factory=list)

    def forward_began(self) -> None:
        """Closes the books on the iteration before."""
        if self._is_sampled(self._iterations):
            moments = (self._forward, self._backward, self._backward_end, self._exchange, self._exchange_end)
            if self._exchange_end and self._forward:
                self._unread.append((self._iterations, moments))
            else:
                self.iteration = self._iterations
        # A GPU comes by its moments later: they are read when that costs no waiting.
        while self._unread and is_past(self._unread[0][1][-1]):
            self._keep(*self._unread.pop(0))
        self._iterations += 1
        recording = current_recording(any_step=True)
        if recording is not None:
            recording.use_clock(self.device_clock)
            recording.begin_step()
        # An event costs some microseconds, so a device has none that nobody reads.
        self._measures = (
            self.device_clock is None or self._is_sampled(self._iterations) or current_recording() is not None
        )
        self._forward = self._now()
        self._backward = self._backward_end = self._exchange = self._exchange_end = 0

    def _is_sampled(self, iteration: int) -> bool:
        return iteration > 0 and (iteration < _ALWAYS_SAMPLED or iteration % self.sample_rate == 0)

    def _now(self) -> int | Moment:
        if self.device_clock is None:
            return time.perf_counter_ns()
        return self.device_clock.now() if self._measures else 0

    def forward_ended(self, outputs: object) -> None:
        """The model has returned its outputs. While a recording is on, a backward that comes by them is watched."""
        recording = current_recording()
        if recording is None:
            return
        recording.add("forward", MAIN, self._forward, self._now())
        step = recording.step

        def reached(gradient: torch.Tensor) -> None:
            # A backward that comes by several outputs is one backward.
            if self._outputs_reached != step:
                self._outputs_reached = step
                begin = self._now()
                torch.autograd.Variable._execution_engine.queue_callback(lambda: ended(begin))

        def ended(begin: int | Moment) -> None:
            # With an exchange, its callback was queued later and has not run yet: backward is over now.
            recording.add("backward", MAIN, begin, self._now(), step=step)

        tensor: Any
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(reached)

    def backward_began(self) -> None:
        """The first gradient of a backward has come."""
        self._backward = self._now()

    def exchange_began(self) -> int | Moment:
        """A bucket is launched, now: returns the time."""
        now = self._now()
        # The first bucket of a backward begins the exchange.
        if not self._exchange:
            self._exchange = now
        return now

    def bucket_launched(self, begin: int | Moment, bucket: Bucket) -> None:
        """A bucket was launched at `begin`."""
        recording = current_recording()
        if recording is None:
            return
        name = f"bucket {bucket.index}"
        facts = {"bytes": bucket.flat.nbytes, "parameters": [slot.name for slot in bucket.slots]}
        if not recording.add_exchange(name, begin, bucket.work, **facts):
            # The work has no times of its own, so its span ends when all averages have come.
            self._unstamped.append((name, begin, facts))

    def backward_ended(self) -> None:
        """All gradients have come."""
        self._backward_end = self._now()

    def exchange_ended(self, buckets: int) -> None:
        """All averages have come, from so many buckets."""
        self.buckets_exchanged = buckets
        self._exchange_end = self._now()
        recording = current_recording()
        if recording is not None:
            recording.add("wait for averages", MAIN, self._backward_end, self._exchange_end)
            for name, begin, facts in self._unstamped:
                recording.add(name, EXCHANGE, begin, self._exchange_end, **facts)
        self._unstamped.clear()

    def _keep(self, iteration: int, moments: tuple[int | Moment, ...]) -> None:
        """Takes the moments of an iteration: of its forward, backward and its end, exchange and its end."""
        forward, backward, backward_end, exchange, exchange_end = (_ns(each, moments[0]) for each in moments)
        self.iteration = iteration
        # All buckets may have been skipped.
        exchange = exchange or exchange_end
        durations = {
            "forward_compute_time": backward - forward,
            "backward_compute_time": backward_end - backward,
            "backward_comm_time": exchange_end - exchange,
            "backward_compute_comm_overlap_time": max(1, backward_end - exchange),
        }
        # 0 stands for what was never measured.
        durations = {name: max(1, duration) for name, duration in durations.items()}
        for name, duration in durations.items():
            mean = self.averages.get(f"avg_{name}", 0)
            # A running mean, so that nothing grows with the number of steps.
            self.averages[f"avg_{name}"] = (mean * self._samples + duration) // (self._samples + 1)
        self._samples += 1
        self.last = {
            **durations,
            "forward_compute_time_start": forward,
            "backward_compute_time_start": backward,
            "backward_compute_time_end": backward_end,
            "backward_comm_time_start": exchange,
            "backward_comm_time_end": exchange_end,
        }


def _ns(moment: int | Moment, began: int | Moment) -> int:
    """Of a device: nanoseconds since the forward began, 1 for that itself. 0 for what never came."""
    return 1 + moment.since(began) if isinstance(moment, Moment) and isinstance(began, Moment) else ns_of(moment)
