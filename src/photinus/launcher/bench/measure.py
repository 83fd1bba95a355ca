"""`photinus bench`: lets all backends take turns, prints the table, says what limits them and which to choose."""

from __future__ import annotations

import contextlib
import importlib
import json
import platform
import shutil
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...errors import LaunchError
from ...version import __version__
from ..contestants.contestant import Contestant, torch_ranks
from ..doctor.software import ask_torch
from ..workers.devices import usable_cores
from .explain import print_explanation
from .gpu_model import explain_gpus
from .keep import keep_choice
from .options import DTYPES, Options, parse_bench, parser
from .result import COPIES, COPY, HOST_COPY, Result, choose, limits

__all__ = ["main", "parser"]

_ROUNDS = 3


def main(arguments: Sequence[str]) -> int:
    """Measures; returns 1 when a backend that was asked for failed, else 0.

    Raises:
        UsageError: words that cannot be carried out.
        LaunchError: there is no torch, no backend works, or a picture is asked for that cannot be drawn.
    """
    options = parse_bench(arguments)
    if options.explain:
        print_explanation(options, options.ranks or max(2, min(8, usable_cores())))
        return 0
    if options.plot is not None:
        importlib.import_module("matplotlib")  # found missing before anything is measured
    torch = ask_torch(options.timeout_s)
    if torch.facts is None:
        raise LaunchError(f"photinus bench needs PyTorch: {torch.error}")
    ranks = options.ranks or max(2, len(torch.facts["gpus"]) or min(8, usable_cores()))
    if options.device == "cuda" and not torch.facts["gpus"]:
        raise LaunchError("photinus bench --device cuda: torch sees no GPU here. `photinus doctor` says why.")
    usable = _usable_backends(torch.facts, ranks, options.device)
    wanted = options.backends or usable
    results, absent = _measure(options, wanted, ranks)
    backends = [name for name in wanted if name not in absent]
    if not backends or not results:
        raise LaunchError("; ".join(f"{name} failed: {reason}" for name, reason in absent.items()))
    from .table import plot, print_table

    best, reason = choose(results, backends)
    kept = keep_choice(options, usable, results, torch.facts, best, reason)
    on_gpus = options.device == "cuda"
    title = f"{ranks} ranks, {options.dtype}, {usable_cores()} usable cores"
    if on_gpus:
        title += f", tensors on {len(torch.facts['gpus'])} x {torch.facts['gpus'][0]['name']}"
    if options.as_json:
        print(json.dumps({**_as_json(results, title, absent, best, reason, torch.facts), "kept": kept}, indent=1))
    else:
        print(f"{title}; {platform.machine()}, torch {torch.facts['version']}, Photinus {__version__}\n")
        print_table(results, backends)
        print()
        told = [line for name in backends for line in limits(results, name, through_host=on_gpus)]
        told += explain_gpus(results[-1], len(torch.facts["gpus"])) if on_gpus else []
        told += [f"{name}: did not take part: {why}" for name, why in absent.items()]
        for line in [*told, "", f"Choose {best}: {reason}.", *filter(None, [kept])]:
            print(textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent="  "))
    if options.plot is not None:
        plot(results, backends, f"Collectives on one host: {title}", options.plot)
        print(f"The picture is in {options.plot}.", file=sys.stderr)
    return int(bool(options.backends and absent))


def _usable_backends(facts: dict[str, Any], ranks: int, device: str) -> tuple[str, ...]:
    nccl = facts["available"]["nccl"] and len(facts["gpus"]) >= ranks
    ucc = facts["available"]["ucc"] and device != "cuda"
    return ("photinus", "gloo", *(("nccl",) if nccl else ()), *(("ucc",) if ucc else ()))


def _measure(options: Options, backends: Sequence[str], ranks: int) -> tuple[list[Result], dict[str, str]]:
    """All results, and why some backends have none."""
    results: list[Result] = []
    everybody = [
        Contestant(name, torch_ranks(name, ranks, device=options.device), ranks, timeout_s=options.timeout_s)
        for name in (*backends, COPY)
    ]
    if options.device == "cuda":
        everybody.append(Contestant(HOST_COPY, torch_ranks(COPY, ranks), ranks, timeout_s=options.timeout_s))
    with contextlib.ExitStack() as stack, _status() as say:
        for each in everybody:
            stack.enter_context(each)
        for operation in options.operations:
            for size in sorted(options.sizes_bytes):
                item = DTYPES[options.dtype]
                elems = max(1, size // item // ranks) * ranks
                say(f"{operation} {elems * item} bytes")
                for each in everybody:
                    each.prepare(options.dtype, elems * item)
                seconds = _take_turns(everybody, operation, options.seconds / _ROUNDS)
                results.append(Result(operation, elems * item, elems, options.dtype, ranks, seconds))
    return results, {
        each.name: each.absent for each in everybody if each.absent is not None and each.name not in COPIES
    }


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], object]]:
    """A line that says what is measured now, where stderr is a terminal; gone in the end."""
    from rich.console import Console

    with Console(stderr=True, highlight=False).status("starting") as status:
        yield status.update


def _take_turns(everybody: Sequence[Contestant], operation: str, seconds: float) -> dict[str, float]:
    """The median over the rounds for each contestant: in each round everybody has one turn."""
    paths = {each.name: COPY if each.name in COPIES else operation for each in everybody}
    calls = {each.name: each.calls_for(seconds, paths[each.name]) for each in everybody}
    rounds = [{each.name: each.run(paths[each.name], calls[each.name]) for each in everybody} for _ in range(_ROUNDS)]
    times = {each.name: [taken[each.name] for taken in rounds] for each in everybody}
    return {name: statistics.median(t for t in taken if t) for name, taken in times.items() if None not in taken}


def _as_json(
    results: Sequence[Result], title: str, absent: dict[str, str], best: str, reason: str, torch: dict[str, Any]
) -> dict[str, Any]:
    return {
        "title": title,
        "photinus": __version__,
        "torch": torch["version"],
        "unit": "seconds per call, GB/s",
        "results": [
            {
                "operation": each.operation,
                "bytes": each.size_bytes,
                "dtype": each.dtype,
                "ranks": each.ranks,
                "seconds": each.seconds,
                "algbw": {name: each.algbw(name) for name in each.seconds},
                "busbw": {name: each.busbw(name) for name in each.seconds if name not in COPIES},
            }
            for each in results
        ],
        "absent": absent,
        "choose": best,
        "because": reason,
    }
