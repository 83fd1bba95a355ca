"""Fits the simulator's model to measured cases, and shows what it predicts of the others.

    sudo .venv/bin/python benchmarks/hosts.py --cases 2x1 4x1 2x2 3+1 3x2 8x1 --rates 1gbit \\
        --contestants photinus --out benchmarks/results/scale_1gbit.json
    .venv/bin/python benchmarks/scale.py benchmarks/results/scale_*.json --out benchmarks/results/scale.md

The arguments are what `hosts.py --out` wrote. Fitted on 2x1 and 4x1 at 1gbit alone; all other rows are predictions.
With --out FILE.md the table is written there, and the fitted model beside it, as FILE.model.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import engines
import report
from emulated import BURST_BYTES, bits_per_s
from harness import MIB, size_name

FITTED = {("2x1", "1gbit"), ("4x1", "1gbit")}
WITHIN = {True: 0.10, False: 0.30}  # from 1 MiB on, and below
CALLS = 12
# In the model's units. Known are rate, packets, cards' token buckets, cores, the engine's spinning; socket-ns is the
# processor time that hosts.py counts for 2x1 and 16 MiB, less additions; the rest is too little of these times for a
# fit to tell. With FREE the search begins.
KNOWN = {
    "burst-bytes": BURST_BYTES,
    "payload-bytes": 1448,
    "header-bytes": 66,
    "socket-ns": 0.45,
    "copy-ns": 0.12,
    "add-ns": 0.12,
    "counter-us": 1,
    "switch-us": 5,
    "spin-us": 100,
    "machines": 1,
}
FREE = {"latency-us": 20.0, "send-us": 5.0, "receive-us": 5.0, "call-us": 5.0, "wake-us": 50.0}
Model = dict[str, float]


def simulated(program: Path, model: Model, case: str, rate: str, sizes: Sequence[int]) -> list[float]:
    """Seconds of an all_reduce of ordinary tensors, one for each size."""
    words = [case, *map(str, sizes), "--memory", "ordinary", "--calls", str(CALLS), "--json"]
    values = {**model, "rate-gbit": bits_per_s(rate) / 1e9}
    words += [word for name, value in values.items() for word in (f"--{name}", repr(value))]
    ended = subprocess.run([program, *words], capture_output=True, text=True, timeout=300)
    if ended.returncode != 0:
        raise RuntimeError(ended.stderr.strip())
    return [json.loads(line)["seconds"] for line in ended.stdout.splitlines()]


def measured(files: Sequence[Path]) -> dict[tuple[str, str], dict[int, float]]:
    """Medians of photinus: (case, rate) -> bytes -> seconds."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for file in files:
        for row in json.loads(file.read_text())["rows"]:
            if row["operation"] == "all_reduce" and row["dtype"] == "float32" and "photinus" in row["seconds"]:
                found.setdefault((row["case"], row["rate"]), {})[row["bytes"]] = row["seconds"]["photinus"]
    return found


def fit(program: Path, known: Model, cases: dict[tuple[str, str], dict[int, float]]) -> Model:
    """The free parameters that make the cases' errors, divided by what is allowed, least in their squares."""

    def cost(model: Model) -> float:
        def of_case(item: tuple[tuple[str, str], dict[int, float]]) -> float:
            (case, rate), rows = item
            seconds = simulated(program, {**known, **model}, case, rate, list(rows))
            pairs = zip(seconds, rows.items(), strict=True)
            return sum((math.log(ours / theirs) / WITHIN[size >= MIB]) ** 2 for ours, (size, theirs) in pairs)

        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(of_case, cases.items()))

    model, best, factor = dict(FREE), cost(FREE), 3.0
    while factor > 1.05:
        moved = False
        for name in FREE:
            for tried in (model[name] * factor, model[name] / factor):
                other = {**model, name: tried}
                if (new := cost(other)) < best * 0.999:
                    model, best, moved = other, new, True
                    break
        if not moved:
            factor = math.sqrt(factor)
    return {name: float(f"{value:.3g}") for name, value in model.items()}


def table(program: Path, model: Model, cases: dict[tuple[str, str], dict[int, float]]) -> tuple[str, int, int]:
    """Markdown of all cases; how many predictions there are, and how many lie within what is allowed."""
    lines: list[list[Any]] = []
    hits = predictions = 0
    for (case, rate), rows in cases.items():
        for size, ours in zip(rows, simulated(program, model, case, rate, list(rows)), strict=True):
            error = ours / rows[size] - 1
            within = abs(error) <= WITHIN[size >= MIB]
            is_fitted = (case, rate) in FITTED
            if not is_fitted:
                predictions += 1
                hits += within
            what = "fitted" if is_fitted else "within" if within else "missed"
            lines.append([case, rate, size_name(size), f"{rows[size] * 1e3:.4g}", f"{ours * 1e3:.4g}", f"{error:+.0%}"])
            lines[-1].append(what)
    head = ["case", "rate", "size", "measured, ms", "simulated, ms", "error", "10 % from 1 MiB, 30 % below"]
    return report.table(head, lines), hits, predictions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="what hosts.py --out wrote")
    parser.add_argument("--out", type=Path, help="Markdown")
    parser.add_argument("--cores", type=int, default=2, help="of the machine on which it was measured (2)")
    arguments = parser.parse_args()
    cases = {where: rows for where, rows in measured(arguments.records).items() if where[1] != "none"}
    if missing := FITTED - cases.keys():
        sys.exit(f"not in the records: {', '.join(f'{case} at {rate}' for case, rate in sorted(missing))}")
    program = engines.build_native(engines.SOURCE / "build/engines/native", "simulate")
    known = {**KNOWN, "cores": float(arguments.cores)}
    model = {**known, **fit(program, known, {where: cases[where] for where in FITTED})}
    rows, hits, predictions = table(program, model, cases)
    kept = "".join(f"{name} {value:g}\n" for name, value in model.items())
    dates = ", ".join(sorted({json.loads(file.read_text())["date"] for file in arguments.records}))
    text = (
        "# The simulator beside what was measured\n\n"
        f"Measured on {dates} by `hosts.py` (all_reduce, float32, ordinary tensors; hosts are network namespaces on a "
        f"machine with {arguments.cores} cores, which all of them share). Fitted on 2x1 and 4x1 at 1gbit; "
        f"{hits} of {predictions} predictions lie within what is allowed. Why others do not: docs/scale.md.\n\n"
        f"{rows}\n\nThe model:\n\n```\n{kept}```\n"
    )
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
        arguments.out.with_suffix(".model").write_text(kept)


if __name__ == "__main__":
    main()
