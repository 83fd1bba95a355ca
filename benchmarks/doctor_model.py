"""Steps that `photinus doctor --model` reports, beside those of a script that trains the same model.

    sudo python benchmarks/doctor_model.py --out benchmarks/results/doctor_model.json

The script wraps the model with photinus.wrap and times its own loop. Both take turns; the median of the rounds counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import harness
import report
import torch
from torch import nn

import photinus

RANKS = (1, 2, 4)
_BAR = 0.15


def mlp() -> nn.Module:
    """0.2 million parameters: small steps."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def wide() -> nn.Module:
    """6.3 million parameters and a small batch: the exchange is large beside computing."""
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def convolutions() -> nn.Module:
    """57,000 parameters that compute much."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


MODELS = {"mlp": (mlp, "64,784"), "wide": (wide, "32,1024"), "convolutions": (convolutions, "64,3,32,32")}


def train(name: str, backend: str, seconds: float) -> float:
    """Train as a script does, and return the seconds of a step."""
    with photinus.init(backend=backend) as world:
        make_model, batch = MODELS[name]
        model = make_model()
        model, optimizer = photinus.wrap(model, torch.optim.AdamW(model.parameters()))
        shape = [int(number) for number in batch.split(",")]
        inputs = torch.randn(shape[0] // world.world_size, *shape[1:])
        calls = torch.zeros(1)

        def steps(count: int) -> float:
            began = time.perf_counter()
            for _ in range(count):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            return (time.perf_counter() - began) / count

        steps(5)
        calls.fill_(seconds / steps(10))
        torch.distributed.broadcast(calls, 0)
        return steps(max(5, int(calls)))


def main() -> None:
    """Measure all, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each training")
    parser.add_argument("--out", type=Path, help="JSON of all figures; the table goes beside it")
    arguments = parser.parse_args()
    harness.enter_namespace()  # gloo's loopback as on most machines
    machine = harness.machine()
    harness.warn(machine)
    rows: list[dict[str, Any]] = []
    lines = []
    for name, (_, batch) in MODELS.items():
        for backend in ("photinus", "gloo"):
            said: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
            seen: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
            for _ in range(arguments.rounds):
                command = [sys.executable, "-m", "photinus", "doctor", "--model", f"{__file__}:{name}", "--json"]
                command += ["--batch", batch, "--backend", backend]
                found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                for row in found["ranks"]:
                    said[row["ranks"]].append(row["step_s"])
                for ranks in RANKS:
                    times = photinus.launch(
                        train, nprocs=ranks, args=(name, backend, arguments.seconds), cpu=True, oversubscribe=True
                    )
                    seen[ranks].append(max(times))
            for ranks in RANKS:
                rows.append(
                    {
                        "model": name,
                        "backend": backend,
                        "ranks": ranks,
                        "doctor_s": said[ranks],
                        "script_s": seen[ranks],
                    }
                )
                ours, true = statistics.median(said[ranks]), statistics.median(seen[ranks])
                off = ours / true - 1
                figures = [
                    f"{ours * 1e3:.2f} ms",
                    f"{true * 1e3:.2f} ms",
                    f"{off:+.0%}",
                    "" if abs(off) <= _BAR else "miss",
                ]
                pays = statistics.median(seen[1]) / true
                lines.append([f"{name}, batch {batch}", backend, str(ranks), *figures, f"{pays:.2f}"])
                print(*lines[-1], sep="  ", flush=True)
    kept = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "machine": machine,
        "unit": "seconds of a step, of each round",
        "rows": rows,
    }
    known = [f"{kept['date']}, `{kept['command']}`", "", *(f"- {key}: {value}" for key, value in machine.items())]
    head = ["model", "backend", "ranks", "doctor says", "the script takes", "difference", "", "speed-up of the script"]
    if arguments.out is not None:
        table = report.table(head, lines)
        harness.write(
            arguments.out, kept, "\n".join(["# Predictions of photinus doctor --model", "", *known, "", table, ""])
        )


if __name__ == "__main__":
    main()
