"""Measures the processor time that `photinus.Loop` adds to a step of a plain loop, in turns; one process.

    python benchmarks/loop.py --before HEAD~1 --out benchmarks/results/loop.json

The model is tiny, so that little hides what is added. All loops have the same body (forward, backward, SGD, gradients
set to None): a plain one over torch's DataLoader; a plain one over `photinus.loader` with `photinus.backward`; Loop
over the same loader, without a folder; and Loop with an average of the weights and early stopping, beside a plain loop
with torch's AveragedModel. A figure is the median over the rounds of the difference within a round. With --before, the
same loops over the source of that commit take turns with these, in processes of their own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if source := os.environ.get("PHOTINUS_SOURCE"):  # an editable install is found before sys.path
    sys.meta_path = [each for each in sys.meta_path if "editable" not in type(each).__module__]
    sys.path.insert(0, source)

import harness
import report
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import photinus

BATCH = 8
QUIET = photinus.Reporting(progress=False, curves=False)
LIMIT_US = 20.0  # of Loop above the plain loop over the same loader


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def plain(data: TensorDataset, *, ours: bool, averages: bool = False) -> None:
    model, optimizer = training()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99)) if averages else None
    batches: Any = (
        photinus.loader(data, batch_size=BATCH) if ours else DataLoader(data, BATCH, shuffle=True, drop_last=True)
    )
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        photinus.backward(loss) if ours else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)


def loop(data: TensorDataset, *, averages: bool = False) -> None:
    model, optimizer = training()
    state: dict[str, Any] = {}
    if averages:
        average = photinus.Average(model, get_ema_multi_avg_fn(0.99))
        state = {"average": average, "stopping": photinus.EarlyStopping("-loss")}
    steps = photinus.Loop(
        model, optimizer, photinus.loader(data, batch_size=BATCH), epochs=1, state=state, report=QUIET
    )
    for inputs, targets in steps:
        steps.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


WAYS: dict[str, Callable[[TensorDataset], None]] = {
    "DataLoader": lambda data: plain(data, ours=False),
    "loader": lambda data: plain(data, ours=True),
    "Loop": loop,
    "loader, average": lambda data: plain(data, ours=True, averages=True),
    "Loop, average": lambda data: loop(data, averages=True),
}
PAIRS = {
    "photinus.loader, above torch's DataLoader": ("loader", "DataLoader"),
    "Loop, above a plain loop over photinus.loader": ("Loop", "loader"),
    "Loop with Average and EarlyStopping, above a plain loop with AveragedModel": ("Loop, average", "loader, average"),
}


def measure(steps: int) -> dict[str, float]:
    """Microseconds of processor time a step, of each way in this process: the least of three turns."""
    torch.set_num_threads(1)
    samples = steps * BATCH
    data = TensorDataset(torch.randn(samples, 16), torch.randint(4, (samples,)))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with photinus.init("gloo", "cpu", seed=0):
        for turn in range(4):
            for way, run in WAYS.items():
                began = time.process_time()
                run(data)
                if turn:
                    times[way].append((time.process_time() - began) / steps * 1e6)
    return {way: min(each) for way, each in times.items()}


def measure_in_process(steps: int, source: str) -> dict[str, float]:
    """The same in a new process, with the package of another folder; empty: with this one."""
    command = [sys.executable, __file__, "--measure", "--steps", str(steps)]
    ended = subprocess.run(command, env={**os.environ, "PHOTINUS_SOURCE": source}, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--before", metavar="COMMIT")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help=f"exit with 1 where Loop adds more than {LIMIT_US} us")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.steps)))
        return
    facts = harness.machine()
    harness.warn(facts)
    sources = {"now": ""}
    times: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="photinus-bench-") as folder:
        if arguments.before:
            archive = subprocess.run(["git", "archive", arguments.before, "src"], stdout=subprocess.PIPE, check=True)
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            sources[f"before ({arguments.before})"] = f"{folder}/src"
        for _ in range(arguments.rounds):
            for name, source in sources.items():
                for way, us in measure_in_process(arguments.steps, source).items():
                    times.setdefault(name, {}).setdefault(way, []).append(us)
    rows = [
        [
            way,
            *(f"{statistics.median(times[name][way]):.1f}" for name in times),
            *(f"{min(times[name][way]):.1f}" for name in times),
        ]
        for way in WAYS
    ]
    added = {
        name: {
            what: statistics.median([a - b for a, b in zip(found[more], found[less], strict=True)])
            for what, (more, less) in PAIRS.items()
        }
        for name, found in times.items()
    }
    head = ["us a step", *(f"median, {name}" for name in times), *(f"least, {name}" for name in times)]
    tables = [
        report.table(head, rows),
        report.table(
            ["what is added, us a step", *times], [[what, *(f"{added[n][what]:.1f}" for n in times)] for what in PAIRS]
        ),
    ]
    print(*tables, sep="\n\n")
    kept = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "machine": facts,
        "unit": "microseconds of processor time a step, of each round",
        "rows": times,
        "added": added,
    }
    known = [f"{kept['date']}, `{kept['command']}`", "", *(f"- {name}: {value}" for name, value in facts.items())]
    if arguments.out is not None:
        text = "\n\n".join(["# What Loop adds to a step", "\n".join(known), *tables]) + "\n"
        harness.write(arguments.out, kept, text)
    if arguments.check and max(added["now"][name] for name in [*PAIRS][1:]) > LIMIT_US:
        sys.exit(1)


if __name__ == "__main__":
    main()
