"""When forward, backward and exchange of an iteration began and ended, by this host's clock.

torch's class tells these times by names of its own (`_get_ddp_logging_data`). Keeping them costs a few readings of the
clock; a picture of an iteration is `photinus.trace`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

# As torch's class samples, whose names `last` and `averages` have.
_ALWAYS_SAMPLED = 10


@dataclass
class Timeline:
    """Times in nanoseconds. An iteration is a forward that is followed by an exchange, and what follows.

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
    _moments: dict[str, int] = field(default_factory=dict)

    def forward_began(self) -> None:
        """Closes the books on the iteration before."""
        count, moments = self._iterations, self._moments
        if count > 0 and (count < _ALWAYS_SAMPLED or count % self.sample_rate == 0):
            self.iteration = count
            if {"backward", "exchange_end"} <= moments.keys():
                self._keep(**moments)
        self._iterations += 1
        self._moments = {}
        self.note("forward")

    def note(self, moment: str) -> None:
        """Notes when one of backward, exchange (of the first bucket), backward_end and exchange_end is: now."""
        self._moments.setdefault(moment, time.perf_counter_ns())

    def _keep(
        self, forward: int, backward: int, backward_end: int, exchange_end: int, exchange: int | None = None
    ) -> None:
        exchange = exchange or exchange_end  # all buckets may have been skipped
        durations = {
            "forward_compute_time": backward - forward,
            "backward_compute_time": backward_end - backward,
            "backward_comm_time": exchange_end - exchange,
            "backward_compute_comm_overlap_time": backward_end - exchange,
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
