"""The examples on one process with all cores, and on two: training samples per second of both, which take turns.

    python benchmarks/second_process.py --out benchmarks/results/second_process.json

A turn is a whole run of the script, started as the README does. Its figure is the median over its epochs but the first.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
import report
from turns import busy_share

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "first"
SCRIPTS = ("images.py", "train.py")
WAYS = {"one": [sys.executable], "two": [sys.executable, "-m", "photinus", "run", "--cpu", "--nproc-per-node", "2"]}


def turn(way: str, script: str) -> tuple[float, list[float]]:
    """Run a script. Return its samples per second, and the loss of each epoch."""
    with tempfile.TemporaryDirectory(prefix="second-process-") as folder:
        command = [*WAYS[way], str(EXAMPLES / script), f"{folder}/run"]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if ended.returncode != 0:
            raise RuntimeError(f"{command} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
        with open(f"{folder}/run/metrics.csv") as file:
            rows = list(csv.DictReader(file))
    return statistics.median(float(row["samples_per_s"]) for row in rows[1:]), [float(row["loss"]) for row in rows]


def main() -> None:
    """Measure, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON of all figures; the table goes beside it")
    arguments = parser.parse_args()
    machine = harness.machine()
    harness.warn(machine)
    rows, lines = [], []
    for script in SCRIPTS:
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        losses: dict[str, list[float]] = {}
        busy = []
        for number in range(arguments.rounds):
            busy.append(busy_share(1.0))
            for way in list(WAYS) if number % 2 else list(WAYS)[::-1]:
                speed, losses[way] = turn(way, script)
                found[way].append(speed)
        ratio = statistics.median(two / one for one, two in zip(found["one"], found["two"], strict=True))
        apart = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
        rows.append({"script": script, **found, "ratio": ratio, "losses_apart": apart, "busy_before": busy})
        medians = [f"{statistics.median(each):,.0f}" for each in found.values()]
        lines.append([script, *medians, f"{ratio:.2f}", f"{apart:.1e}", f"{max(busy):.0%}"])
        print(*lines[-1], sep="  ", flush=True)
    head = ["script", "one process", "two processes", "two / one", "losses apart", "others' share of the cores"]
    kept = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "machine": machine,
        "unit": "samples per second of each round",
        "rows": rows,
    }
    known = [f"{kept['date']}, `{kept['command']}`", "", *(f"- {key}: {value}" for key, value in machine.items())]
    table = report.table(head, lines)
    if arguments.out is not None:
        title = "# One process with all cores, and two: samples per second"
        harness.write(arguments.out, kept, "\n".join([title, "", *known, "", table, ""]))
    print(json.dumps(rows) if arguments.out is None else table)


if __name__ == "__main__":
    main()
