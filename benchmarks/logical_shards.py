"""Measures the steps of a Loop over logical shards beside those of the same Loop without them, in turns.

    OMP_NUM_THREADS=1 photinus run --cpu --nproc-per-node 2 benchmarks/logical_shards.py --out x.json

Two pairs on W ranks: as many shards as ranks, beside "ddp"; and four times as many, beside `accumulate=4` over batches
of a quarter of the size, so that all kernels have the same shapes. Each also with an audit in every step: with
`audit_every=50`, a fiftieth of what that adds. A figure is the median over the rounds of the ratio within a round, of
the median step.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import harness
import report
import torch
from ranks import models
from torch.utils.data import TensorDataset

import photinus

SEQUENCES = 4  # of a rank in a step
QUIET = photinus.Reporting(progress=False, curves=False)


def steps_s(model: str, tokens: int, steps: int, shards: int, parts: int, audit_every: int | None = None) -> float:
    """The median of the seconds of a step, in which each rank computes its sequences in so many parts."""
    with photinus.init(device="cpu", seed=1, logical_shards=shards or None) as world:
        torch.set_num_threads(1)
        plain, _ = models.make(f"{model}:{SEQUENCES // parts}x{tokens}")
        wrapped, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
        sequences = SEQUENCES * world.world_size
        batch_size = sequences if shards else sequences // parts
        data = TensorDataset(torch.randint(64, (sequences, tokens)))
        options: dict[str, Any] = {"accumulate": 1 if shards else parts, "report": QUIET, "audit_every": audit_every}
        loop = photinus.Loop(wrapped, optimizer, data, batch_size=batch_size, steps=steps, **options)
        took, began = [], time.perf_counter()
        for (batch,) in loop:
            loop.backward(wrapped(batch))
            if loop.step_due:
                optimizer.step()
                optimizer.zero_grad()
                now = time.perf_counter()
                took.append(now - began)
                began = now
        wrapped.reducer.stop()
    return statistics.median(took[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-20m")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    facts = harness.machine()
    with photinus.init(device="cpu") as world:
        ranks = world.world_size
        ways: dict[str, tuple[int, ...]] = {
            "ddp": (0, 1), "V = W": (ranks, 1), "V = W, audit": (ranks, 1, 1),
            "accumulate=4": (0, 4), "V = 4 W": (4 * ranks, 4), "V = 4 W, audit": (4 * ranks, 4, 1),
        }  # fmt: skip
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(arguments.rounds + 1):
            for way, options in ways.items():
                took = steps_s(arguments.model, arguments.tokens, arguments.steps, *options)
                if turn:  # the first warms up
                    times[way].append(took)
        if not world.is_main:
            return
    pairs = {
        "V = W, beside ddp": ("V = W", "ddp"),
        "V = W, an audit in each step beside none": ("V = W, audit", "V = W"),
        "V = 4 W, beside accumulate=4": ("V = 4 W", "accumulate=4"),
        "V = 4 W, an audit in each step beside none": ("V = 4 W, audit", "V = 4 W"),
    }
    ratios = {
        name: statistics.median([a / b for a, b in zip(times[more], times[less], strict=True)])
        for name, (more, less) in pairs.items()
    }
    rows = [[way, f"{statistics.median(each) * 1e3:.1f}", f"{min(each) * 1e3:.1f}"] for way, each in times.items()]
    tables = [
        report.table(["ms a step", "median", "least"], rows),
        report.table(["", "ratio"], [[name, f"{ratio:.3f}"] for name, ratio in ratios.items()]),
    ]
    print(*tables, sep="\n\n")
    if arguments.out is not None:
        kept = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "machine": facts,
            "ranks": ranks,
            "unit": "seconds of a step: the median of each turn",
            "rows": times,
            "ratios": ratios,
        }
        known = [f"{kept['date']}, `{kept['command']}`, {ranks} ranks", ""]
        known += [f"- {name}: {value}" for name, value in facts.items()]
        text = "\n\n".join(["# Steps over logical shards", "\n".join(known), *tables]) + "\n"
        harness.write(arguments.out, kept, text)


if __name__ == "__main__":
    main()
