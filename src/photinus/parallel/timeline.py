"""When forward, backward and exchange of each iteration began and ended, as this process saw it.

Always kept, for it costs a few readings of the clock; while a recording is on (`photinus.trace`), it gets the spans.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from .gradient_memory import Bucket
from .recording import EXCHANGE, MAIN, current_recording
from .tensors import tensors_in

__all__ = ["Timeline"]

_ALWAYS_SAMPLED = 10


@dataclass
class Timeline:
    """Times in nanoseconds of one clock. An iteration is a forward that is followed by an exchange, and what follows.

    Attributes:
        sample_rate: after the first ten iterations, every so many are kept.
        iteration: number of the last one that was kept (0 is the first).
        last: durations and beginnings of that one, by name.
        averages: mean durations over all that were kept.
        buckets_exchanged: in the last backward.
        error: text of the last error, "" if there was none.
    """

    sample_rate: int = 100
    iteration: int = 0
    last: dict[str, int] = field(default_factory=dict)
    averages: dict[str, int] = field(default_factory=dict)
    buckets_exchanged: int = 0
    error: str = ""
    _iterations: int = 0
    _samples: int = 0
    _forward: int = 0
    _outputs_reached: int = -1  # the last recorded step in which backward came by the model's outputs
    _backward: int = 0
    _backward_end: int = 0
    _exchange: int = 0
    _exchange_end: int = 0
    _unstamped: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)

    def forward_began(self) -> None:
        """Closes the books on the iteration before."""
        done = self._iterations
        if done and (done < _ALWAYS_SAMPLED or done % self.sample_rate == 0):
            self.iteration = done
            if self._exchange_end and self._forward:
                self._keep()
        self._iterations += 1
        self._forward = time.perf_counter_ns()
        self._backward = self._backward_end = self._exchange = self._exchange_end = 0
        recording = current_recording(any_step=True)
        if recording is not None:
            recording.begin_step()

    def forward_ended(self, outputs: object) -> None:
        """The model has returned its outputs. While a recording is on, a backward that comes by them is watched."""
        recording = current_recording()
        if recording is None:
            return
        now = time.perf_counter_ns()
        recording.add("forward", MAIN, self._forward, now)
        step = recording.step

        def reached(gradient: torch.Tensor) -> None:
            if self._outputs_reached != step:
                self._outputs_reached = step
                begin = time.perf_counter_ns()
                torch.autograd.Variable._execution_engine.queue_callback(lambda: ended(begin))

        def ended(begin: int) -> None:
            # With an exchange, its callback was queued later and has not run yet: backward is over now.
            recording.add("backward", MAIN, begin, time.perf_counter_ns(), step=step)

        tensor: Any
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(reached)

    def backward_began(self) -> None:
        """The first gradient of a backward has come."""
        self._backward = time.perf_counter_ns()

    def exchange_began(self) -> int:
        """A bucket is launched, now: returns the time."""
        now = time.perf_counter_ns()
        if not self._exchange:
            self._exchange = now
        return now

    def bucket_launched(self, begin_ns: int, bucket: Bucket) -> None:
        """A bucket was launched at `begin_ns`."""
        recording = current_recording()
        if recording is None:
            return
        name = f"bucket {bucket.index}"
        facts = {"bytes": bucket.flat.nbytes, "parameters": [slot.name for slot in bucket.slots]}
        if not recording.add_exchange(name, begin_ns, bucket.work, **facts):
            self._unstamped.append((name, begin_ns, facts))

    def backward_ended(self) -> None:
        """All gradients have come."""
        self._backward_end = time.perf_counter_ns()

    def exchange_ended(self, buckets: int) -> None:
        """All averages have come, from so many buckets."""
        self.buckets_exchanged = buckets
        self._exchange_end = time.perf_counter_ns()
        recording = current_recording()
        if recording is not None:
            recording.add("wait for averages", MAIN, self._backward_end, self._exchange_end)
            for name, begin, facts in self._unstamped:
                recording.add(name, EXCHANGE, begin, self._exchange_end, **facts)
        self._unstamped.clear()

    def _keep(self) -> None:
        exchange = self._exchange or self._exchange_end
        durations = {
            "forward_compute_time": self._backward - self._forward,
            "backward_compute_time": self._backward_end - self._backward,
            "backward_comm_time": self._exchange_end - exchange,
            "backward_compute_comm_overlap_time": max(1, self._backward_end - exchange),
        }
        durations = {name: max(1, duration) for name, duration in durations.items()}
        for name, duration in durations.items():
            mean = self.averages.get(f"avg_{name}", 0)
            self.averages[f"avg_{name}"] = (mean * self._samples + duration) // (self._samples + 1)
        self._samples += 1
        self.last = {
            **durations,
            "forward_compute_time_start": self._forward,
            "backward_compute_time_start": self._backward,
            "backward_compute_time_end": self._backward_end,
            "backward_comm_time_start": exchange,
            "backward_comm_time_end": self._exchange_end,
        }
