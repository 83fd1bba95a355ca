"""One measurement, its bandwidths; and what many of them mean: what limits a backend here, and which one to choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .options import size_name

COPY, HOST_COPY = COPIES = ("copy", "copy in host memory")
"""No backends: what all ranks take to copy their tensor at once (those on GPUs: to the host and back); and to copy as
much in the host's memory, where tensors lie on GPUs."""
_BUCKET_BYTES = 25 << 20
"""What torch's and our DDP exchange at once."""
_LATENCY_BOUND = 0.5  # of a call's time that a call of next to nothing takes
_MEMORY_BOUND = 0.5  # of what copying reaches
_OWN_WORK = {
    "photinus": "steps through shared memory, waiting for the other ranks",
    "gloo": "sockets, extra copies",
    "nccl": "kernels, links between the GPUs",
    "ucc": "whichever transport it chose",
}


def bus_factor(operation: str, ranks: int) -> float:
    """What busbw is of algbw (the formulas of nccl-tests, doc/PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", COPY) else (ranks - 1) / ranks


@dataclass(frozen=True)
class Result:
    """Mean times of one operation and size: {backend: seconds}, with what COPIES take."""

    operation: str
    size_bytes: int
    dtype: str
    ranks: int
    seconds: dict[str, float]

    def algbw(self, backend: str) -> float:
        """Bytes of the tensor per second, in GB/s."""
        return self.size_bytes / self.seconds[backend] / 1e9

    def busbw(self, backend: str) -> float:
        """What each rank has to move for it, per second, in GB/s."""
        return self.algbw(backend) * bus_factor(self.operation, self.ranks)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        read = {"operation": self.operation, "bytes": self.size_bytes, "dtype": self.dtype, "ranks": self.ranks}
        read |= {"seconds": self.seconds, "algbw": {name: self.algbw(name) for name in self.seconds}}
        return read | {"busbw": {name: self.busbw(name) for name in self.seconds if name not in COPIES}}


def limits(results: Sequence[Result], backend: str, *, through_host: bool = False) -> list[str]:
    """A sentence about small and one about large tensors.

    `through_host`: they lie on GPUs, and are copied to the host and back; nccl need not do that.
    """
    known = [each for each in results if backend in each.seconds and each.operation == results[0].operation]
    if not known:
        return []
    smallest, largest = known[0], known[-1]
    overhead = smallest.seconds[backend]
    lines = []
    bound = [each for each in known if overhead >= _LATENCY_BOUND * each.seconds[backend]]
    if len(bound) < len(known) or len(known) == 1:
        what = f"the {overhead * 1e6:.0f} µs that a call takes whatever its size"
        lines.append(f"{backend}: up to {size_name(bound[-1].size_bytes)} the limit is {what}.")
    else:
        lines.append(f"{backend}: at every size here, most of the time is what a call takes in any case.")
    if COPY in largest.seconds and largest is not smallest and not (through_host and backend == "nccl"):
        # An all_reduce reads and writes each byte once at least, as a copy does.
        share = largest.seconds[COPY] / largest.seconds[backend]
        size = size_name(largest.size_bytes)
        copy, limit = ("copies to the host and back", "PCIe or host memory") if through_host else ("a copy", "memory")
        if share >= 1:
            whole = copy if through_host else "a copy of the tensor"
            lines.append(f"{backend}: at {size} it is as fast as {whole}: {limit} is the limit.")
        elif share >= _MEMORY_BOUND:
            lines.append(f"{backend}: at {size} it runs at {share:.0%} of the speed of {copy}: {limit} is the limit.")
        else:
            lines.append(
                f"{backend}: at {size} it runs at {share:.0%} of the speed of {copy}: its own work "
                f"({_OWN_WORK[backend]}) is the limit, not {limit}."
            )
    return lines


def choose(results: Sequence[Result], backends: Sequence[str]) -> tuple[str, str]:
    """The backend for training here, and why: the fastest near the size of a gradient bucket."""
    operation = results[0].operation
    known = [each for each in results if each.operation == operation and any(name in each.seconds for name in backends)]
    near = min(known, key=lambda each: abs(math.log(each.size_bytes / _BUCKET_BYTES)))
    ranked = sorted((name for name in backends if name in near.seconds), key=lambda name: near.seconds[name])
    best, size = ranked[0], size_name(near.size_bytes)
    if len(ranked) == 1:
        return best, f"it is the only one that was measured, {near.algbw(best):.1f} GB/s at {size}"
    ratio = near.seconds[ranked[1]] / near.seconds[best]
    reason = f"{ratio:.1f} × as fast as {ranked[1]} at {size}, near the size in which gradients travel"
    small = known[0]
    faster = [n for n in ranked[1:] if n in small.seconds and small.seconds[n] < small.seconds.get(best, 0) / 1.2]
    if faster:
        reason += f" (for single small tensors {faster[0]} is faster)"
    return best, reason
