"""`photinus bench`: lets all backends take turns, prints the table, says what limits them and which to choose."""

from __future__ import annotations

import json
import platform
import shutil
import textwrap
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from typing import Any

from ...cli.flag_values import positive_seconds, whole_number
from ...cli.parser import Parser
from ...errors import DeviceError, LaunchError
from ...run.local.devices import usable_cores
from ...verdict import Setting, driver_version, keep_verdict
from ...version import __version__
from ..doctor.plan import COPY, Plan
from ..doctor.software import ask_torch
from ..doctor.turns import measure
from .result import Result, choose, limits, print_table

_LEAST_BYTES = 1 << 20  # below, it is latency that is compared
_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_BACKENDS = ("photinus", "gloo", "nccl", "ucc")
DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
_SIZES = tuple(4 ** (power + 1) * 1024 for power in range(8))
_MOST_RANKS = 1024
_UNITS = {"B": 1, "K": 1 << 10, "KiB": 1 << 10, "M": 1 << 20, "MiB": 1 << 20, "G": 1 << 30, "GiB": 1 << 30}

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
    """Return the parser of the command line. A value that is None is found out here."""
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


def _measure(options: Namespace, backends: Sequence[str], ranks: int) -> tuple[list[Result], dict[str, str]]:
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
    results = [Result(*call, options.dtype, ranks, times) for call, times in zip(calls, found, strict=bool(found))]
    return results, absent


def keep_choice(
    options: Namespace, usable: Sequence[str], results: Sequence[Result], torch: dict[str, Any], best: str, why: str
) -> str:
    """Keep the choice on GPUs for backend "auto". Return a line that says so, or why not; "" if no GPU was measured.

    `usable`: all backends that these ranks could take; `torch`: what `ask_torch` found.
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
        path = keep_verdict(Setting(gpus, driver_version(), torch["version"]), best, why)
    except OSError as error:
        return f'cannot save this result for backend "auto": {error}.'
    return f'Saved in {path}: on these GPUs, {len(gpus)} ranks with backend "auto" take {best} from now on.'
