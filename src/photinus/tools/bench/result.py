"""One measurement, its bandwidths; and what many of them mean: what limits a backend here, and which one to choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..doctor.plan import COPY

_BUCKET_BYTES = 25 << 20  # what torch's and our DDP exchange at once
_LATENCY_BOUND = 0.5  # of a call's time that a call of next to nothing takes
_MEMORY_BOUND = 0.5  # of what copying reaches
_CLEARLY = 1.2  # times as fast, so that it is not chance
_OWN_WORK = {
    "photinus": "steps through shared memory, waiting for the other ranks",
    "gloo": "sockets, extra copies",
    "nccl": "kernels, links between the GPUs",
    "ucc": "whichever transport it chose",
}


def size_name(size_bytes: int) -> str:
    """Like 4 KiB or 16 MiB."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:g} {unit}"
    return f"{size_bytes} B"


def bus_factor(operation: str, ranks: int) -> float:
    """Return busbw / algbw (the formulas of nccl-tests, doc/PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if operation in ("broadcast", COPY) else (ranks - 1) / ranks


@dataclass(frozen=True)
class Result:
    """Mean times of one operation and size: {backend: seconds}, with what COPY takes."""

    operation: str
    size_bytes: int
    dtype: str
    ranks: int
    seconds: dict[str, float]

    def algbw(self, backend: str) -> float:
        """Return the bytes of the tensor per second, in GB/s."""
        return self.size_bytes / self.seconds[backend] / 1e9

    def busbw(self, backend: str) -> float:
        """Return the bytes per second that each rank has to move for it, in GB/s."""
        return self.algbw(backend) * bus_factor(self.operation, self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return all figures, for programs."""
        read = {"operation": self.operation, "bytes": self.size_bytes, "dtype": self.dtype, "ranks": self.ranks}
        read |= {"seconds": self.seconds, "algbw": {name: self.algbw(name) for name in self.seconds}}
        return read | {"busbw": {name: self.busbw(name) for name in self.seconds if name != COPY}}


def limits(results: Sequence[Result], backend: str, *, through_host: bool = False) -> list[str]:
    """Return a sentence about small tensors and one about large ones.

    `through_host`: they lie on GPUs, and are copied to the host and back; nccl need not do that.
    """
    series = [each for each in results if each.operation == results[0].operation]
    smallest, largest = series[0], series[-1]
    overhead = smallest.seconds[backend]
    lines = []
    bound = [each for each in series if overhead >= _LATENCY_BOUND * each.seconds[backend]]
    if len(bound) < len(series) or len(series) == 1:
        what = f"the {overhead * 1e6:.0f} µs that a call of any size takes"
        lines.append(f"{backend}: up to {size_name(bound[-1].size_bytes)} the limit is {what}.")
    else:
        lines.append(f"{backend}: at every size here, most of the time is what a call takes in any case.")
    if largest is not smallest and not (through_host and backend == "nccl"):
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
    """Return the backend for training here, the fastest near the size of a gradient bucket, and why."""
    series = [each for each in results if each.operation == results[0].operation]
    near = min(series, key=lambda each: abs(math.log(each.size_bytes / _BUCKET_BYTES)))
    best, *others = sorted(backends, key=lambda name: near.seconds[name])
    size, small = size_name(near.size_bytes), series[0].seconds
    if not others:
        return best, f"it is the only one that was measured, {near.algbw(best):.1f} GB/s at {size}"
    ratio = near.seconds[others[0]] / near.seconds[best]
    reason = f"{ratio:.1f} × as fast as {others[0]} at {size}, near the size in which gradients travel"
    faster = [name for name in others if small[name] < small[best] / _CLEARLY]
    if faster:
        reason += f" (for single small tensors {faster[0]} is faster)"
    return best, reason


_FIGURE = 7  # columns of the table


def print_table(results: Sequence[Result], backends: Sequence[str]) -> None:
    """Print three columns for each backend. Two backends fit 80 columns; more are wider rather than lose figures."""
    rows = [["", "", *(head for name in backends for head in (name, "", "")), "copy"]]
    rows.append(["size", "operation", *("µs", "algbw", "busbw") * len(backends), "GB/s"])
    for result in results:
        cells = [size_name(result.size_bytes), result.operation]
        for name in backends:
            time = result.seconds[name] * 1e6
            cells += [f"{time:.1f}" if time < 1000 else f"{time:.0f}"]
            cells += [f"{result.algbw(name):.2f}", f"{result.busbw(name):.2f}"]
        rows.append([*cells, f"{result.algbw(COPY):.1f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[2:-1] = [max(_FIGURE, width) for width in widths[2:-1]]
    for size, operation, *figures in rows:
        cells = [f"{size:>{widths[0]}}", f"{operation:<{widths[1]}}"]
        print(*cells, *(f"{cell:>{width}}" for cell, width in zip(figures, widths[2:], strict=True)))
