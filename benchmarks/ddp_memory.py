"""Peak memory of a few training steps: our DistributedDataParallel against torch's, on two ranks.

    python benchmarks/ddp_memory.py --out benchmarks/results/ddp_memory.json --check

256 MiB of parameters in linear layers, a batch of one, SGD. The figure is what all ranks together took at their worst
moment beyond what they had before the model was made, in proportional set size (a page that several ranks share counts
once), sampled every few milliseconds; divided by the ranks. Each way runs in processes of its own, one after another.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import report

RANKS = Path(__file__).resolve().parent / "ranks"
MIB = 1 << 20
WAYS = {
    "ours": ("photinus", "photinus", []),
    "ours, gradients are views": ("photinus", "photinus", ["--views"]),
    "torch's, gradients are views": ("torch", "gloo", ["--views"]),
    "torch's": ("torch", "gloo", []),
    "bare model": ("none", "gloo", []),
}
OURS, RIVAL = "ours", "torch's, gradients are views"


def shares(pids: list[int]) -> int:
    """Bytes of all processes, shared pages counted once among them."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def measure(wrapper: str, backend: str, options: list[str], ranks: int, mib: int, steps: int) -> dict[str, float]:
    """MiB per rank, beyond what there was before the model: at the worst moment, and when all steps are done."""
    with tempfile.TemporaryDirectory(prefix="photinus-bench-") as folder:
        command = [sys.executable, str(RANKS / "memory_rank.py"), wrapper, backend]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), folder, str(mib), str(steps), *options],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(ranks)
        ]
        try:
            pids = [process.pid for process in processes]
            wait_for(folder, "ready", ranks, processes)
            before = peak = shares(pids)
            Path(folder, "go").touch()
            while len(list(Path(folder).glob("done.*"))) < ranks:
                check(processes)
                peak = max(peak, shares(pids))
            after = shares(pids)
            Path(folder, "leave").touch()
            for process in processes:
                process.wait(timeout=60)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    return {"peak": (peak - before) / ranks / MIB, "after": (after - before) / ranks / MIB}


def wait_for(folder: str, what: str, ranks: int, processes: list[subprocess.Popen[bytes]]) -> None:
    while len(list(Path(folder).glob(f"{what}.*"))) < ranks:
        check(processes)
        time.sleep(0.01)


def check(processes: list[subprocess.Popen[bytes]]) -> None:
    for rank, process in enumerate(processes):
        if process.poll() not in (None, 0):
            raise RuntimeError(f"rank {rank} ended with code {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default 2)")
    parser.add_argument("--mib", type=int, default=256, help="MiB of parameters (default 256)")
    parser.add_argument("--steps", type=int, default=4, help="training steps (default 4)")
    parser.add_argument("--out", type=Path, help="write the figures to this .json file, and the table to .md beside it")
    parser.add_argument("--check", action="store_true", help="exit with 1 if ours takes more than torch's with views")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for name, (wrapper, backend, options) in WAYS.items():
        rows[name] = measure(wrapper, backend, options, arguments.ranks, arguments.mib, arguments.steps)
        print(f"{name}: {rows[name]['peak']:.0f} MiB at the peak, {rows[name]['after']:.0f} after", flush=True)
    lines = [[name, f"{row['peak']:.0f}", f"{row['after']:.0f}"] for name, row in rows.items()]
    kept = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "machine": harness.machine(),
        "unit": f"MiB per rank of {arguments.ranks}, beyond what there was before a model of {arguments.mib} MiB",
        "rows": rows,
    }
    facts = [f"{kept['date']}, `{kept['command']}`", "", *(f"- {n}: {v}" for n, v in harness.machine().items())]
    head = ["MiB per rank", "peak", "after the steps"]
    cleared = rows[OURS]["peak"] <= rows[RIVAL]["peak"]
    verdict = f"{OURS}: {rows[OURS]['peak']:.0f} MiB, {RIVAL}: {rows[RIVAL]['peak']:.0f} MiB: " + (
        "cleared." if cleared else "**missed**."
    )
    text = "\n".join(["# Peak memory of training steps", "", *facts, "", report.table(head, lines), "", verdict, ""])
    print("\n" + text)
    if arguments.out:
        arguments.out.write_text(json.dumps(kept, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(text)
    if arguments.check and not cleared:
        sys.exit(1)


if __name__ == "__main__":
    main()
