"""When forward, backward and exchange of each iteration began and ended, as this process saw it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

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
    _backward: int = 0
    _backward_end: int = 0
    _exchange: int = 0
    _exchange_end: int = 0

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

    def backward_began(self) -> None:
        """The first gradient of a backward has come."""
        self._backward = time.perf_counter_ns()

    def exchange_began(self) -> None:
        """A bucket is launched."""
        if not self._exchange:
            self._exchange = time.perf_counter_ns()

    def backward_ended(self) -> None:
        """All gradients have come."""
        self._backward_end = time.perf_counter_ns()

    def exchange_ended(self, buckets: int) -> None:
        """All averages have come, from so many buckets."""
        self.buckets_exchanged = buckets
        self._exchange_end = time.perf_counter_ns()

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
