"""Measures the cost of saving: steps beside a save, and the time that it blocks, with photinus and with others.

    sudo python benchmarks/saving.py --out benchmarks/results/saving.json

One rank on two cores leaves one free; two ranks leave none. The methods take turns, round by round: photinus.save with
wait=False, the saves of a photinus.Loop (ddp and zero3), torch.save by rank 0, torch.distributed.checkpoint.async_save,
and Accelerate's save_state (if installed).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import harness
import report

METHODS = ("photinus", "Loop", "Loop zero3", "torch.save", "DCP async_save", "Accelerate")
_RANK = Path(__file__).with_name("ranks") / "saving.py"


def quantile(seconds: list[float], share: float) -> float:
    """The value below which this share of them is."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(method: str, ranks: int, folder: Path, saves: int, width: int) -> dict[str, list[float]]:
    """A run of one method."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [sys.executable, "-m", "photinus", "run", "--cpu", "--nproc-per-node", str(ranks)]
        words = [str(_RANK), method, place, str(saves), str(width)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command + words, capture_output=True, text=True, timeout=900, check=False, env=environ)
    lines = [line[line.index("{") :] for line in run.stdout.splitlines() if '{"alone"' in line]
    if run.returncode or not lines:
        raise SystemExit(f"{method} on {ranks} ranks failed:\n{run.stdout}\n{run.stderr}")
    found: dict[str, list[float]] = json.loads(lines[-1])
    return found


def main() -> None:
    """Measures, prints, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="in each round")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=4096, help="5 layers of width x width; 4096: 1 GB with AdamW")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on the disk to write to")
    arguments = parser.parse_args()
    methods = [name for name in METHODS if name != "Accelerate" or importlib.util.find_spec("accelerate")]
    machine, rows, lines = harness.machine(), [], []
    for ranks in arguments.ranks:
        found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in methods}
        for _ in range(arguments.rounds):
            for name in methods:
                for key, values in measure(name, ranks, arguments.folder, arguments.saves, arguments.width).items():
                    found[name][key] += values
        for name, each in found.items():
            alone, beside = each["alone"], each["beside"]
            ratio = quantile(beside, 0.99) / quantile(alone, 0.99)
            rows.append({"ranks": ranks, "method": name, **each})
            figures = [statistics.median(each["blocked"]), statistics.median(alone), statistics.median(beside)]
            cells = [f"{seconds * 1e3:.0f} ms" for seconds in figures]
            lines.append([str(ranks), name, *cells, f"{len(beside)}", f"{ratio:.2f}"])
            print(*lines[-1], sep="  ", flush=True)
    kept = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "machine": machine,
        "unit": "seconds of each step and of each save",
        "rows": rows,
    }
    known = [f"{kept['date']}, `{kept['command']}`", "", *(f"- {key}: {value}" for key, value in machine.items())]
    head = ["ranks", "method", "blocked", "step", "step beside a save", "steps beside", "p99 beside / p99 alone"]
    if arguments.out is not None:
        harness.write(
            arguments.out, kept, "\n".join(["# What saving costs", "", *known, "", report.table(head, lines), ""])
        )


if __name__ == "__main__":
    main()
