"""Brings every rank's times and memory to rank 0, without an exchange of their own.

They ride along with the loop's exchange of losses, an all-reduce that sums: each rank fills its own place of a vector
that is zero elsewhere, so the sum holds everyone's. So they come to the run's folder from hosts that share no disk,
and rank 0 alone writes. What it costs is thirteen float64 values per rank in an exchange that takes place anyway.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...runlog.windows import MEMORY, PHASES, Window
from ..session.session import Session
from .step_clock import StepClock

_PHASES, _MEMORY = len(PHASES), len(MEMORY)
_LINK = 3  # the peer of the slowest link, plus one; its seconds; those of the median one
_WIDTH = _PHASES + _MEMORY + _LINK
_MOST_STEPS = 16
_PAUSE_S = 1.0
_WRITTEN_AT_FIRST = 2000  # windows; from then on they get longer, so that a run of days does not fill the disk
_RANKS_WRITTEN_AT_ONCE = 32


class RankTimes:
    """The times of all ranks between two exchanges, and on rank 0 the windows to write.

    Attributes:
        steps_to_next: after how many steps the ranks exchange next: about one second's worth, at most 16, equal on
            all ranks. So what is shown of a run is never older than a step or a second, whichever is longer.
    """

    def __init__(self, session: Session, clock: StepClock) -> None:
        self.steps_to_next = 1
        self._session = session
        self._clock = clock
        self._under_way_s = _under_way_s()
        self._began_s = self._written_s = time.perf_counter()
        self._forget()

    def _forget(self) -> None:
        self._steps = self._samples = 0
        self._seconds = [[0.0] * self._session.world_size for _ in PHASES]
        self._slowest: list[defaultdict[int, float]] = [defaultdict(float) for _ in range(self._session.world_size)]
        self._usual_s = [0.0] * self._session.world_size

    def mine(self) -> list[float]:
        """This rank's times since the last exchange and its memory, with zeros in the other ranks' places.

        Its length is 13 * world size; the ranks' vectors are to be summed.
        """
        vector = [0.0] * (_WIDTH * self._session.world_size)
        own = [*self._clock.take(), *map(float, memory_bytes(self._session.device)), *self._links()]
        vector[_WIDTH * self._session.rank : _WIDTH * (self._session.rank + 1)] = own
        return vector

    def _links(self) -> tuple[float, float, float]:
        """Of this rank's links to other hosts since the last call; see _LINK."""
        before, self._under_way_s = self._under_way_s, _under_way_s()
        seconds = {peer: now_s - before.get(peer, 0.0) for peer, now_s in self._under_way_s.items()}
        if not seconds:
            return 0.0, 0.0, 0.0
        slowest = max(seconds, key=lambda peer: seconds[peer])
        return slowest + 1.0, seconds[slowest], statistics.median_low(seconds.values())

    def add(self, everyone: Sequence[float], *, steps: int, samples: int) -> float:
        """Takes the sum of what `mine` returned on all ranks, and the steps and samples since the last exchange.

        Returns:
            The seconds that these steps took the slowest rank, equal on all ranks.
        """
        places = range(0, len(everyone), _WIDTH)
        for phase, seconds in enumerate(self._seconds):
            for rank, place in enumerate(places):
                seconds[rank] += everyone[place + phase]
        for rank, place in enumerate(places):
            peer, worst_s, usual_s = everyone[place + _PHASES + _MEMORY : place + _WIDTH]
            self._slowest[rank][int(peer) - 1] += worst_s
            self._usual_s[rank] += usual_s
        self._memory = [[int(everyone[place + _PHASES + kind]) for place in places] for kind in range(_MEMORY)]
        self._steps += steps
        self._samples += samples
        total_s = max(sum(everyone[place : place + _PHASES]) for place in places)
        if steps:
            longest_s = total_s / steps
            self.steps_to_next = max(1, min(_MOST_STEPS, int(_PAUSE_S / longest_s))) if longest_s > 0 else _MOST_STEPS
        return total_s

    def window(self, *, step: int, epoch: int, start: int, at_once: bool) -> Window | None:
        """What to write now, if it is time: at least a second after the last one, and later ever more seldom.

        `at_once` does not wait longer: the run ends.
        """
        now_s = time.perf_counter()
        pause_s = max(_PAUSE_S, (now_s - self._began_s) / _WRITTEN_AT_FIRST)
        pause_s *= max(1.0, self._session.world_size / _RANKS_WRITTEN_AT_ONCE)
        if not self._steps or (now_s - self._written_s < pause_s and not at_once):
            return None
        self._written_s = now_s
        window = Window(
            time_s=time.time(),
            step=step,
            epoch=epoch,
            start=start,
            steps=self._steps,
            samples=self._samples,
            phases={p: [s / self._steps for s in self._seconds[i]] for i, p in enumerate(PHASES)},
            memory=dict(zip(MEMORY, self._memory, strict=True)),
            links=[
                (
                    peer := max(seconds, key=lambda each: seconds[each]),
                    seconds[peer] / self._steps,
                    usual_s / self._steps,
                )
                for seconds, usual_s in zip(self._slowest, self._usual_s, strict=True)
            ],
        )
        self._forget()
        return window


def _under_way_s() -> dict[int, float]:
    """Of each link that the default group has with a rank of another host; {} where it does not tell."""
    told = getattr(dist.group.WORLD, "under_way_s", None) if dist.is_initialized() else None
    return told() if told is not None else {}


def memory_bytes(device: torch.device) -> tuple[int, int, int, int]:
    """(resident, peak resident, held by tensors on the GPU, the most of that), in bytes; 0 for what cannot be known.

    Costs some 20 us; on a GPU it asks torch's allocator, and does not wait for the device. The peak counts from the
    process's beginning.
    """
    resident = peak = 0
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith(b"VmHWM:"):
                    peak = int(line.split()[1]) * 1024
                elif line.startswith(b"VmRSS:"):
                    resident = int(line.split()[1]) * 1024
                    break
    except (OSError, ValueError, IndexError):
        pass
    if device.type != "cuda":
        return resident, peak, 0, 0
    return resident, peak, torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
