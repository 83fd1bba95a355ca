"""`photinus bench`: lets all backends take turns, prints the table, says what limits them and which to choose."""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from ...errors import LaunchError
from ...version import __version__
from ..doctor.software import ask_torch
from ..workers.devices import usable_cores
from .contestant import Contestant, ContestantError
from .explain import choose, limits
from .options import DTYPES, HELP, Options, parse_bench
from .plot import check_plot, plot
from .result import COPY, Result, table

__all__ = ["main"]

_ROUNDS = 3


def main(arguments: Sequence[str]) -> int:
    """Measures; returns 1 when a backend that was asked for failed, else 0.

    Raises:
        UsageError: words that cannot be carried out.
        LaunchError: there is no torch, no backend works, or a picture is asked for that cannot be drawn.
    """
    options = parse_bench(arguments)
    if options is None:
        print(HELP)
        return 0
    if options.plot is not None:
        check_plot()
    torch = ask_torch(options.timeout_s)
    if torch.facts is None:
        raise LaunchError(f"photinus bench needs PyTorch: {torch.error}")
    ranks = options.ranks or _ranks(torch.facts)
    if options.device == "cuda" and not torch.facts["gpus"]:
        raise LaunchError("photinus bench --device cuda: torch sees no GPU here. `photinus doctor` says why.")
    wanted = options.backends or _working(torch.facts, ranks, options.device)
    results, absent = _measure(options, wanted, ranks)
    backends = [name for name in wanted if name not in absent]
    if not backends or not results:
        raise LaunchError("; ".join(f"{name} failed: {reason}" for name, reason in absent.items()))
    best, reason = choose(results, backends)
    title = f"{ranks} ranks, {options.dtype}, {usable_cores()} usable cores"
    if options.device == "cuda":
        title += f", tensors on {len(torch.facts['gpus'])} x {torch.facts['gpus'][0]['name']}"
    if options.as_json:
        print(json.dumps(_as_json(results, title, absent, best, reason, torch.facts), indent=1))
    else:
        print(f"{title}; {platform.machine()}, torch {torch.facts['version']}, Photinus {__version__}\n")
        print(table(results, backends))
        print()
        told = [line for name in backends for line in limits(results, name)]
        told += [f"{name}: did not take part: {why}" for name, why in absent.items()]
        for line in [*told, "", f"Choose {best}: {reason}."]:
            print(textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent="  "))
    if options.plot is not None:
        plot(results, backends, f"Collectives on one host: {title}", options.plot)
        print(f"The picture is in {options.plot}.", file=sys.stderr)
    return int(bool(options.backends and absent))


def _ranks(facts: dict[str, Any]) -> int:
    return max(2, len(facts["gpus"]) or min(8, usable_cores()))


def _working(facts: dict[str, Any], ranks: int, device: str) -> tuple[str, ...]:
    nccl = facts["available"]["nccl"] and len(facts["gpus"]) >= ranks
    if device == "cuda":
        return ("gloo", *(("nccl",) if nccl else ()))
    return ("photinus", "gloo", *(("nccl",) if nccl else ()), *(("ucc",) if facts["available"]["ucc"] else ()))


def _measure(options: Options, backends: Sequence[str], ranks: int) -> tuple[list[Result], dict[str, str]]:
    """All results, and why some backends have none."""
    results: list[Result] = []
    absent: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        everybody = {
            name: stack.enter_context(Contestant(name, ranks, options.dtype, options.timeout_s, options.device))
            for name in (*backends, COPY)
        }

        def unless_failed(name: str, act: Any, *words: Any) -> Any:
            if name in absent:
                return None
            try:
                return act(*words)
            except ContestantError as error:
                absent[name] = str(error)
                everybody[name].close()
                return None

        for name, each in everybody.items():
            unless_failed(name, each.wait_until_ready)
        for operation in options.operations:
            for size in sorted(options.sizes_bytes):
                item = DTYPES[options.dtype]
                elems = max(1, size // item // ranks) * ranks
                seconds = _turns(everybody, unless_failed, operation, elems, options.seconds)
                results.append(Result(operation, elems * item, elems, options.dtype, ranks, seconds))
                if sys.stderr.isatty():
                    print(f"\r\x1b[K{operation} {results[-1].size_bytes} bytes", end="", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    absent.pop(COPY, None)
    return results, absent


def _turns(
    everybody: dict[str, Contestant], unless_failed: Any, operation: str, elems: int, seconds: float
) -> dict[str, float]:
    """The median over the rounds for each backend: in each round everybody has one turn."""
    calls = {}
    for name, each in everybody.items():
        unless_failed(name, each.prepare, operation, elems)
        calls[name] = unless_failed(name, each.calls_for, seconds / _ROUNDS)
    times: dict[str, list[float]] = {name: [] for name in everybody}
    for _ in range(_ROUNDS):
        for name, each in everybody.items():
            taken = unless_failed(name, each.run, calls[name])
            if taken is not None:
                times[name].append(taken)
    return {name: sorted(taken)[len(taken) // 2] for name, taken in times.items() if len(taken) == _ROUNDS}


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
                "busbw": {name: each.busbw(name) for name in each.seconds if name != COPY},
            }
            for each in results
        ],
        "absent": absent,
        "choose": best,
        "because": reason,
    }
