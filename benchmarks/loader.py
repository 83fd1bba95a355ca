"""Processor time of loading a sample: `photinus.loader` beside torch's DataLoader, in turns.

    python benchmarks/loader.py --out benchmarks/results/loader.json

What seeds the generators for each sample shows most beside items that cost little: a row of 16 numbers, plain, with
noise from torch's generator, or mirrored by a toss of Python's; and an image of 3 x 32 x 32 bytes, normalised.
Processor time is that of the process and its loader workers. The median of the rounds counts.
"""

from __future__ import annotations

import argparse
import datetime
import random
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

import harness
import report
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import photinus


class Cheap(Dataset[tuple[Tensor, int]]):
    """Draws nothing."""

    def __init__(self, samples: int) -> None:
        self.rows = torch.randn(samples, 16)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], index % 10


class Noisy(Cheap):
    """Draws from torch's generator, as augmentation does."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index] + 0.1 * torch.randn(16), index % 10


class Flipped(Cheap):
    """Draws from Python's generator, as augmentation does."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index].flip(0) if random.random() < 0.5 else self.rows[index], index % 10


class Image(Cheap):
    """Bytes to normalised numbers, as a transform does."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.rows = torch.randint(0, 256, (samples, 3, 32, 32), dtype=torch.uint8)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index].float().div(255).sub(0.5).div(0.25), index % 10


DATA = {"row": Cheap, "row, torch.randn": Noisy, "row, random.random": Flipped, "image": Image}


def spent_s() -> float:
    """Processor time of this process, and of its workers that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pass_us(batches: Any, samples: int) -> float:
    """Microseconds of processor time a sample, of one pass."""
    began = spent_s()
    for _ in batches:
        pass
    return (spent_s() - began) / samples * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    facts, rows, lines = harness.machine(), [], []
    harness.warn(facts)
    torch.set_num_threads(1)
    for name, kind in DATA.items():
        data = kind(arguments.samples)
        for batch, workers in ((64, 0), (8, 0), (64, 2)):
            ways = {
                "photinus": photinus.loader(data, batch_size=batch, num_workers=workers),
                "torch": DataLoader(data, batch_size=batch, shuffle=True, num_workers=workers, drop_last=True),
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(arguments.rounds + 1):
                for way, batches in ways.items():
                    spent = pass_us(batches, arguments.samples)
                    if turn:  # the first warms up
                        times[way].append(spent)
            ours, theirs = (statistics.median(times[way]) for way in ways)
            rows.append({"data": name, "batch": batch, "workers": workers, "us": times})
            lines.append(
                [f"{name}, {batch} a batch, {workers} workers", f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"]
            )
            print(*lines[-1], sep="  ", flush=True)
    kept = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "machine": facts,
        "unit": "microseconds of processor time a sample, of each round",
        "rows": rows,
    }
    known = [f"{kept['date']}, `{kept['command']}`", "", *(f"- {name}: {value}" for name, value in facts.items())]
    table = report.table(["us a sample", "photinus.loader", "torch's DataLoader", "ratio"], lines)
    if arguments.out is not None:
        harness.write(arguments.out, kept, "\n".join(["# Processor time of loading", "", *known, "", table, ""]))


if __name__ == "__main__":
    main()
