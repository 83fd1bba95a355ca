"""`photinus bench`: lets all backends take turns, prints the table, says what limits them and which to choose."""

from __future__ import annotations

import importlib
import json
import platform
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from ...errors import DeviceError, LaunchError
from ...run.local.devices import usable_cores
from ...verdict import Setting, driver_version, keep_verdict
from ...version import __version__
from ..doctor.plan import COPIES, COPY, Plan
from ..doctor.software import ask_engine, ask_torch
from ..doctor.turns import measure
from .options import DTYPES, parse_bench, size_name
from .options import parser as parser  # each command has its own, in the module of its main
from .result import Result, choose, explain_gpus, limits, plot, print_table

_PARTS = "all_to_all"
_BY_PARTS = "small: through flat slots; from arenas where a sender's tensors lie there; chunk by chunk else"
_WHOLE = ("reduce_scatter", "all_gather")


def print_explanation(options: Namespace, ranks: int) -> None:
    """Print a table, or JSON. `ranks`: on this host, if no hosts are given. LaunchError: the engine does not work."""
    hosts = options.hosts or (ranks,)
    explained = [_explain(options, hosts, operation) for operation in options.operations]
    if options.as_json:
        print(json.dumps({"hosts": hosts, "unit": "seconds by the model", "operations": explained}, indent=1))
        return
    on = f"{len(hosts)} host{'s' * (len(hosts) > 1)}"
    print(f"{sum(hosts)} ranks on {on}, {options.dtype} in arenas; times by the model of docs/scale.md\n")
    for each in explained:
        if each["levels"]:
            print(f"{each['operation']}: {each['levels']}")
        for call in each["calls"]:
            what = call["algorithm"] + (f" over {call['levels']}" if call["levels"] else "")
            time = f"{call['seconds'] * 1e6:.4g} µs"
            size = size_name(call["bytes"])
            print(f"{size:>9}  {each['operation']:<14} {time:>12}  {what:<16} {call['kernels']}  {call['reason']}")


def _explain(options: Namespace, hosts: tuple[int, ...], operation: str) -> dict[str, Any]:
    item = DTYPES[options.dtype]
    parts = sum(hosts) if operation in _WHOLE else 1
    sizes = [max(1, size // item // parts) for size in sorted(options.sizes_bytes)]
    if operation == _PARTS:
        return {"operation": operation, "levels": _BY_PARTS, "calls": []}
    speeds = (options.latency_us * 1e-6, options.rate_gbit / 8e-9)
    question = {"counts": hosts, "operation": operation, "sizes_elems": sizes, "dtype": options.dtype, "speeds": speeds}
    answer, error = ask_engine(options.timeout_s, json.dumps(question))
    if answer is None:
        raise LaunchError(f"the engine does not work here: {error}")
    levels, calls = answer["explained"]
    calls = [{"bytes": elems * item * parts, **call} for elems, call in zip(sizes, calls, strict=True)]
    return {"operation": operation, "levels": levels, "calls": calls}


_LEAST_BYTES = 1 << 20  # below, it is latency that is compared


def main(arguments: Sequence[str]) -> int:
    """Measure, and return 1 if a backend that was asked for failed, else 0."""
    options = parse_bench(arguments)
    if options.explain:
        print_explanation(options, options.ranks or max(2, min(8, usable_cores())))
        return 0
    if options.plot is not None:
        importlib.import_module("matplotlib")  # found missing before anything is measured
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
        lines += explain_gpus(results[-1], len(gpus)) if on_gpus else []
        lines += [f"{name}: did not take part: {why}" for name, why in absent.items()]
        for line in [*lines, "", f"Choose {best}: {reason}.", *filter(None, [note])]:
            print(textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent="  "))
    if options.plot is not None:
        plot(results, backends, f"Collectives on one host: {title}", options.plot)
        print(f"The picture is in {options.plot}.", file=sys.stderr)
    return int(bool(options.backends and absent))


def _measure(options: Namespace, backends: Sequence[str], ranks: int) -> tuple[list[Result], dict[str, str]]:
    """Return all results, and why some backends have none."""
    from rich.console import Console

    item = DTYPES[options.dtype]
    # reduce_scatter and all_gather need an equal part for each rank.
    sizes = [max(1, size // item // ranks) * ranks * item for size in sorted(options.sizes_bytes)]
    calls = tuple((operation, size) for operation in options.operations for size in sizes)
    copies = COPIES if options.device == "cuda" else (COPY,)
    plan = Plan((*backends, *copies), calls, options.dtype, options.device, options.seconds, options.timeout_s)
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
