"""Measures huge pages and malloc's settings on training steps: page faults, processor time and peak of one process.

    python benchmarks/malloc.py gpt-20m:16x64 resnet-18:16 --rounds 3

Tensors above M_MMAP_THRESHOLD are mapped and unmapped one by one; others lie on the heap, which keeps them up to the
trim threshold. The settings take turns, each in a process of its own: two steps, then five that are measured (forward,
backward, AdamW, gradients set to None).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

RANKS = Path(__file__).resolve().parent / "ranks"
STEPS = 5
HUGE = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
MIB = 1 << 20
SETTINGS = {
    "glibc's own": {},
    "huge pages": HUGE,
    "heap kept, 32 MiB": KEPT | {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB)},
    "huge pages, heap kept, 32 MiB": HUGE | KEPT | {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB)},
    "huge pages, heap kept, 128 MiB": HUGE | KEPT | {"MALLOC_MMAP_THRESHOLD_": str(128 * MIB)},
    "photinus: huge pages, heap kept, 1 GiB": HUGE | KEPT | {"MALLOC_MMAP_THRESHOLD_": str(1024 * MIB)},
}
COLUMNS = ("faults per step", "processor ms per step", "of them in the kernel", "peak MiB")


def measure(model_name: str) -> None:
    """In the process of one setting: prints its numbers."""
    sys.path.insert(0, str(RANKS))
    import models
    import torch

    torch.set_num_threads(1)
    model, inputs = models.make(model_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for step in range(2 + STEPS):
        if step == 2:
            before = resource.getrusage(resource.RUSAGE_SELF)
        model(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = resource.getrusage(resource.RUSAGE_SELF)
    kernel_s, user_s = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
    faults = (after.ru_minflt - before.ru_minflt) / STEPS
    print(json.dumps([faults, (kernel_s + user_s) / STEPS * 1e3, kernel_s / STEPS * 1e3, after.ru_maxrss / 1024]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="as in ddp_steps.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.models[0])
    for model in args.models:
        found: dict[str, list[list[float]]] = {name: [] for name in SETTINGS}
        for _ in range(args.rounds):
            for name, variables in SETTINGS.items():
                environ = {
                    k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "THP_", "GLIBC_"))
                } | variables
                command = [sys.executable, __file__, model, "--measure"]
                ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
                found[name].append(json.loads(ended.stdout))
        print(f"\n## {model}\n\n| setting | {' | '.join(COLUMNS)} |\n|---{'|---:' * len(COLUMNS)}|")
        for name, runs in found.items():
            cells = [f"{statistics.median(column):,.0f}" for column in zip(*runs, strict=True)]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return None


if __name__ == "__main__":
    main()
