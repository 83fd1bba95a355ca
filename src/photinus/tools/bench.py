"""`photinus bench`: how fast collectives are over each backend, what limits them, and which backend to choose."""

from __future__ import annotations

import json
import math
import platform
import shutil
import textwrap
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..backend_choice import Setting, driver_version, write_choice
from ..cli.flag_values import positive_seconds, whole_number
from ..cli.parser import Parser
from ..errors import DeviceError, LaunchError
from ..run.local.devices import usable_cores
from ..version import __version__
from .doctor.plan import COPY, Plan
from .doctor.rounds import measure
from .doctor.software import ask_torch

_LEAST_BYTES = 1 << 20  # below, it is latency that is compared
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_BACKENDS = ("photinus", "gloo", "nccl", "ucc")
DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
_SIZES = tuple(4 ** (power + 1) * 1024 for power in range(8))
_MOST_RANKS = 1024
_UNITS = {"B": 1, "K": 1 << 10, "KiB": 1 << 10, "M": 1 << 20, "MiB": 1 << 20, "G": 1 << 30, "GiB": 1 << 30}
_BUCKET_BYTES = 25 << 20  # what torch's and our DDP exchange at once
_LATENCY_BOUND = 0.5  # share of a call's time that the smallest call takes: above it, latency is the limit
_MEMORY_BOUND = 0.5  # share of a copy's speed: above it, memory is the limit
_CLEARLY = 1.2  # times as fast: less may be chance
_OWN_WORK = {
    "photinus": "steps through shared memory, waiting for the other ranks",
    "gloo": "sockets, extra copies",
    "nccl": "kernels, links between the GPUs",
    "ucc": "whichever transport it chose",
}
_FIGURE = 7  # columns of a figure in the table

_ABOUT = """\
Measure collectives on this host over every backend that works here, in turns.
Compare them with plain memory copies by the same ranks. Print what limits each
backend, and which one to choose. Separate lists by commas."""
_MORE = """\
examples:
  photinus bench
  photinus bench --nproc-per-node 4 --ops all_reduce,all_gather --sizes 1M,16M
  photinus bench --device cuda

algbw is the size divided by the time. busbw counts the bytes that each rank has
to move for it, as nccl-tests do: compare it between operations and numbers of
ranks. The size is that of the whole tensor: reduce_scatter's input on each
rank, all_gather's output.

exit code: 0; 1 if a backend that you asked for failed; 2 for wrong use, or if
the device does not exist."""


def parser() -> Parser:
    """Return the parser of the command line. Values that are None are chosen later."""
    parser = Parser("bench", "[flags]", about=_ABOUT, more=_MORE)
    ranks = "number of ranks, at least 2. default: one per GPU, or per usable core (2 to 8)"
    parser.add("--nproc-per-node N", ranks, whole_number(2, _MOST_RANKS), dest="ranks")
    where = "device of the tensors. cuda: the fastest backend is saved, and backend auto uses it from then on; with "
    where += "fewer GPUs than ranks, ranks share GPUs, without nccl. default: cpu (nccl: GPUs)"
    parser.add("--device cpu|cuda", where, one_of=("cpu", "cuda"), default="cpu")
    operations = f"operations: {', '.join(_OPERATIONS)}. default: all_reduce"
    parser.add("--ops LIST", operations, some_of=_OPERATIONS, default=("all_reduce",), dest="operations")
    sizes = "sizes of the tensor, like 4K,1M,64M. default: 4K, 16K, ... 64M"
    parser.add("--sizes LIST", sizes, _sizes, default=_SIZES, dest="sizes_bytes")
    parser.add("--dtype TYPE", f"one of {', '.join(DTYPES)}. default: float32", one_of=tuple(DTYPES), default="float32")
    parser.add("--backends LIST", f"backends: {', '.join(_BACKENDS)}. default: all that work here", some_of=_BACKENDS)
    parser.add("--seconds S", "approximate time of each measurement. default: 0.3", positive_seconds, default=0.3)
    parser.add("--json", "print the figures as JSON", dest="as_json")
    each = "timeout of each measurement. default: 120"
    parser.add("--timeout SECONDS", each, positive_seconds, default=120.0, dest="timeout_s")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    found = []
    for word in text.replace(",", " ").split():
        number = word.rstrip("BKMGi")
        try:
            found.append(int(float(number) * _UNITS[word[len(number) :] or "B"]))
        except (ValueError, KeyError, OverflowError):
            raise ArgumentTypeError("needs sizes like 512, 4K, 16M or 1GiB.") from None
    if not found or min(found) < 1:
        raise ArgumentTypeError("needs at least 1 byte.")
    return tuple(found)


def main(arguments: Sequence[str]) -> int:
    """Measure, and return 1 if a backend that was asked for failed, else 0."""
    options = parser().parse(arguments)
    torch, error = ask_torch(options.timeout_s)
    if torch is None:
        raise LaunchError(f"photinus bench needs PyTorch: {error}")
    gpus, on_gpus = torch["gpus"], options.device == "cuda"
    ranks = options.ranks or max(2, len(gpus) or min(8, usable_cores()))
    flag = "--device cuda" if on_gpus else "--backends nccl" if "nccl" in (options.backends or ()) else ""
    if flag and not gpus:
        raise DeviceError(f"photinus bench {flag}: torch sees no GPU here. `photinus doctor` shows the reason.")
    usable = ["photinus", "gloo"]
    usable += ["nccl"] if torch["available"]["nccl"] and len(gpus) >= ranks else []
    usable += ["ucc"] if torch["available"]["ucc"] and not on_gpus else []
    candidates = options.backends or usable
    results, absent = _measure(options, candidates, ranks)
    if not results:
        raise LaunchError("; ".join(f"{name} failed: {reason}" for name, reason in absent.items()))
    backends = [name for name in candidates if name not in absent]
    best, reason = choose(results, backends)
    note = keep_choice(options, usable, results, torch, best, reason)
    title = f"{ranks} ranks, {options.dtype}, {usable_cores()} usable cores"
    title += f", tensors on {len(gpus)} x {gpus[0]['name']}" if on_gpus else ""
    if options.as_json:
        facts: dict[str, Any] = {"title": title, "photinus": __version__, "torch": torch["version"]}
        facts |= {"unit": "seconds per call, GB/s", "results": [each.as_json() for each in results], "absent": absent}
        print(json.dumps({**facts, "choose": best, "because": reason, "kept": note}, indent=1))
    else:
        print(f"{title}; {platform.machine()}, torch {torch['version']}, Photinus {__version__}\n")
        print_table(results, backends)
        print()
        lines = [line for name in backends for line in limits(results, name, through_host=on_gpus)]
        lines += [f"{name}: did not take part: {why}" for name, why in absent.items()]
        for line in [*lines, "", f"Choose {best}: {reason}.", *filter(None, [note])]:
            print(textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent="  "))
    return int(bool(options.backends and absent))


def _measure(options: Namespace, backends: Sequence[str], ranks: int) -> tuple[list[Measurement], dict[str, str]]:
    """Return all results, and why some backends have none."""
    from rich.console import Console

    item = DTYPES[options.dtype]
    # reduce_scatter and all_gather need an equal part for each rank.
    sizes = [max(1, size // item // ranks) * ranks * item for size in sorted(options.sizes_bytes)]
    calls = tuple((operation, size) for operation in options.operations for size in sizes)
    plan = Plan((*backends, COPY), calls, options.dtype, options.device, options.seconds, options.timeout_s)
    console = Console(stderr=True, highlight=False)  # a line that says what is measured now, where that is a terminal
    with console.status("starting") as status:
        found, absent = measure(plan, ranks, status.update)
    results = [Measurement(*call, options.dtype, ranks, times) for call, times in zip(calls, found, strict=bool(found))]
    return results, absent


def keep_choice(
    options: Namespace,
    usable: Sequence[str],
    results: Sequence[Measurement],
    torch: dict[str, Any],
    best: str,
    why: str,
) -> str:
    """Keep the choice on GPUs for backend "auto". Return a line that says so, or why not; "" if no GPU was measured.

    `usable`: backends that work here with this number of ranks; `torch`: the answer of `ask_torch`.
    """
    if options.device != "cuda":
        return ""
    left_out = [name for name in usable if options.backends is not None and name not in options.backends]
    of_buckets = [each for each in results if each.operation == "all_reduce" and each.size_bytes >= _LEAST_BYTES]
    gpus = tuple(torch["gpus"][rank % len(torch["gpus"])]["uuid"] for rank in range(results[0].ranks))
    reason = ""
    if left_out:
        reason = f"{', '.join(left_out)} was left out"
    elif results[0].operation != "all_reduce" or not of_buckets:
        reason = "this needs an all_reduce of 1 MiB or more"
    elif not all(gpus):
        reason = "torch reports no UUID of these GPUs"
    if reason:
        return f'This result is not saved for backend "auto": {reason}.'
    try:
        path = write_choice(Setting(gpus, driver_version(), torch["version"]), best, why)
    except OSError as error:
        return f'cannot save this result for backend "auto": {error}.'
    return f'Saved in {path}: on these GPUs, {len(gpus)} ranks with backend "auto" take {best} from now on.'


# -- measurements ------------------------------------------------------------------------------------------------------


def size_name(size_bytes: int) -> str:
    """Return a size like 4 KiB or 16 MiB."""
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
class Measurement:
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


def limits(results: Sequence[Measurement], backend: str, *, through_host: bool = False) -> list[str]:
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


def choose(results: Sequence[Measurement], backends: Sequence[str]) -> tuple[str, str]:
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


def print_table(results: Sequence[Measurement], backends: Sequence[str]) -> None:
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
