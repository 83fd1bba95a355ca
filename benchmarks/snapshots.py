"""Measures how long snapshots in memory block the ranks, beside a bare copy of the same bytes by all ranks at once.

    python benchmarks/snapshots.py --out benchmarks/results/snapshots.json

Two ranks train 1 GB of parameters and AdamW states with DDP, with a snapshot every four steps. One copy runs beside the
next forward and backward, the next one is waited for immediately, in turn. In a step without a snapshot each rank
copies as many bytes with memmove into a memory file that it has mapped, both at the same time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EVERY = 4
COLUMNS = {
    "beside": "blocked, beside forward and backward",
    "at once": "blocked, waited for immediately",
    "bare": "bare copy",
}


def train(folder: str, width: int, layers: int, batch: int, rounds: int) -> None:
    """In each rank: prints its times."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import photinus

    torch.set_num_threads(1)
    with photinus.init("photinus", seed=0) as world:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        model, optimizer = photinus.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-6))
        data = torch.utils.data.TensorDataset(torch.randn(2 * batch, width))
        loop = photinus.Loop(
            model, optimizer, data, batch_size=2 * batch, steps=EVERY * (2 * rounds + 1) + 3, out=folder,
            save=photinus.Saving(snapshot_every=EVERY, every_epochs=10**6),
            report=photinus.Reporting(progress=False, curves=False),
        )  # fmt: skip
        snapshots = loop._snapshots
        found: dict[str, list[float]] = {
            name: [] for name in (*COLUMNS, "beside: forward and backward", "copy", "digest", "processor")
        }
        spent = {"s": 0.0, "processor_s": 0.0}

        def timed(call: Any, sign: int) -> Any:
            def run(*arguments: Any) -> Any:
                began_s, began_processor_s = time.perf_counter(), time.thread_time()
                try:
                    return call(*arguments)
                finally:
                    spent["s"] += sign * (time.perf_counter() - began_s)
                    spent["processor_s"] += sign * (time.thread_time() - began_processor_s)

            return run

        # In the exchange a rank waits for the slower one, as it would in the next one of the training.
        for name, sign in {"take": 1, "settle": 1, "_wait": 1, "_most": -1}.items():
            setattr(snapshots, name, timed(getattr(snapshots, name), sign))
        target, size, sources = mmap.mmap(-1, 1), 0, [torch.empty(0)]
        for (inputs,) in loop:
            step, place = loop.step - 1, (loop.step - 1) % EVERY  # 0: the step before was kept
            is_kept = place == 0 and step >= 2 * EVERY  # the first two touch new memory
            beside = step // EVERY % 2 == 0
            if is_kept and not beside:
                snapshots._wait()
                copy = snapshots._copy
                found["at once"].append(spent["s"])
            if place == EVERY - 1 and step > 2 * EVERY:
                if len(target) == 1:
                    file = os.memfd_create("bare")
                    os.ftruncate(file, size)
                    target = mmap.mmap(file, size)
                address = ctypes.addressof(ctypes.c_char.from_buffer(target))
                dist.barrier()
                began_s = time.perf_counter()
                at = 0
                for source in sources:
                    count = min(source.nbytes, len(target) - at)
                    ctypes.memmove(address + at, source.data_ptr(), count)
                    at += count
                found["bare"].append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            loop.backward(model(inputs).square().mean())
            forward_s = time.perf_counter() - began_s
            optimizer.step()
            optimizer.zero_grad()
            if is_kept and beside:
                copy = snapshots._copy
                found["beside"].append(spent["s"])
                found["processor"].append(spent["processor_s"])
                found["beside: forward and backward"].append(forward_s)
            if place == 0 and step:
                size, copy = snapshots._copy.bytes, snapshots._copy
                sources = [p.data for p in model.parameters()]
                sources += [t for s in optimizer.state.values() for t in (s["exp_avg"], s["exp_avg_sq"])]
            if place == 2 and step > 2 * EVERY:
                found["copy"].append(copy.copy_s)
                found["digest"].append(copy.cpu_s)
            spent.update(s=0.0, processor_s=0.0)
        text = json.dumps({"rank": world.rank, "bytes": size, "found": found})
        Path(folder, f"times-{world.rank}.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        return train(args.train, args.width, args.layers, args.batch, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--width", args.width, "--layers", args.layers, "--batch", args.batch, "--rounds", args.rounds]
        command = [
            sys.executable,
            "-m",
            "photinus",
            "run",
            "--cpu",
            "--max-restarts",
            "0",
            "--nproc-per-node",
            "2",
            __file__,
            "--train",
            folder,
        ]
        subprocess.run([*command, *map(str, words)], check=True, stdout=sys.stderr)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("times-*.json"))]
    found = {
        name: [max(each) for each in zip(*(r["found"][name] for r in ranks), strict=True)] for name in ranks[0]["found"]
    }
    ms = {name: 1e3 * statistics.median(values) for name, values in found.items()}
    cores = len(os.sched_getaffinity(0))
    lines = [
        f"# Snapshots of {sum(r['bytes'] for r in ranks) / 1e9:.2f} GB by 2 ranks on {cores} cores",
        "",
        f"{platform.processor() or platform.machine()}, {time.strftime('%Y-%m-%d')}, `{' '.join(sys.argv)}`. Median of "
        f"{len(found['bare'])} turns, of each the slowest rank.",
        "",
        "| | ms | of the bare copy |",
        "|---|---:|---:|",
        *(f"| {text} | {ms[name]:.1f} | {ms[name] / ms['bare']:.2f} |" for name, text in COLUMNS.items()),
        "",
        f"Forward and backward beside a copy took {ms['beside: forward and backward']:.0f} ms, and the copy "
        f"{ms['copy']:.0f} ms. Processor time: {ms['processor']:.1f} ms of the thread that trains, {ms['digest']:.0f} "
        f"ms for copy and digest, on each rank.",
    ]
    print("\n".join(lines))
    if args.out:
        args.out.write_text(json.dumps({"command": sys.argv, "ms": ms, "seconds": found}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return None


if __name__ == "__main__":
    main()
