"""One measurement, its bandwidths; and what many of them mean: what limits a backend here, and which one to choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runlog.units import bandwidth
from ..doctor.plan import COPIES, COPY, HOST_COPY
from .options import size_name

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


def bus_factor(operation: str, ranks: int) -> float:
    """Return busbw / algbw (the formulas of nccl-tests, doc/PERFORMANCE.md)."""
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
        """Return the bytes of the tensor per second, in GB/s."""
        return self.size_bytes / self.seconds[backend] / 1e9

    def busbw(self, backend: str) -> float:
        """Return the bytes per second that each rank has to move for it, in GB/s."""
        return self.algbw(backend) * bus_factor(self.operation, self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return all figures, for programs."""
        read = {"operation": self.operation, "bytes": self.size_bytes, "dtype": self.dtype, "ranks": self.ranks}
        read |= {"seconds": self.seconds, "algbw": {name: self.algbw(name) for name in self.seconds}}
        return read | {"busbw": {name: self.busbw(name) for name in self.seconds if name not in COPIES}}


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


_OTHERS = (2, 4, 8)
_FIGURE = 7  # columns of the table


def predict(gpus: int, link: float, memory: float) -> tuple[float, str]:
    """Return the most bytes of the tensor per second of an all_reduce, and what binds: "PCIe" or "host memory".

    Args:
        gpus: ranks of one host, each with a GPU.
        link: bytes per second of a GPU's link, each way while the other way is busy and all GPUs copy.
        memory: bytes per second of the host's memory, read and written taken together.
    """
    return min((link, "PCIe"), (memory / (3 * gpus + 1), "host memory"))


def explain_gpus(result: Result, gpus: int) -> list[str]:
    """Return lines on the ceiling here, and for other numbers of such GPUs, from the largest tensor's result."""
    link = result.size_bytes / result.seconds[COPY]
    memory = 2 * result.ranks * result.size_bytes / result.seconds[HOST_COPY]  # each copy reads and writes
    here, binds = predict(result.ranks, link, memory)
    each = "link" if result.ranks <= gpus else "rank's share of a link"
    lines = [
        f"An all_reduce through the host reaches {bandwidth(here)} here at most, and {binds} binds. "
        f"(Predicted from counted bytes: each {each} carries the tensor both ways, at {bandwidth(link)} while all "
        f"copy; host memory carries it {3 * result.ranks + 1} times, at {bandwidth(memory)}.)"
    ]
    if result.ranks <= gpus:
        others = {number: predict(number, link, memory) for number in _OTHERS if number != result.ranks}
        words = ", ".join(f"{number}: {bandwidth(ceiling)} ({what})" for number, (ceiling, what) in others.items())
        lines.append(f"Predicted for other numbers of such GPUs, if their links stay as fast: {words}.")
    return lines


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


def plot(results: Sequence[Result], backends: Sequence[str], title: str, path: Path) -> None:
    """Draw bandwidth over size, a line for each backend and operation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    operations = list(dict.fromkeys(each.operation for each in results))
    styles = ("-", "--", ":", "-.", (0, (1, 3)))
    for operation, style in zip(operations, styles, strict=False):
        series = [each for each in results if each.operation == operation]
        sizes = [each.size_bytes for each in series]
        for number, backend in enumerate(backends):
            label = backend if len(operations) == 1 else f"{backend}, {operation}"
            how: dict[str, Any] = {"linestyle": style, "color": f"C{number}", "marker": "o", "markersize": 4}
            axes.plot(sizes, [each.algbw(backend) for each in series], label=label, **how)
        if operation == operations[0]:
            axes.plot(sizes, [each.algbw(COPY) for each in series], color="0.6", label="all ranks copy memory")
    sizes = sorted({each.size_bytes for each in results})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [size_name(size) for size in sizes], rotation=30)
    axes.minorticks_off()
    axes.set_xlabel("tensor")
    axes.set_ylabel("GB/s (tensor's bytes / time)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
