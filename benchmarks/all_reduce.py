"""all_reduce through torch.distributed: backend photinus (tensors in the arena, and ordinary ones) against gloo.

    python benchmarks/all_reduce.py                         # 2 and 4 ranks, 4 KiB to 64 MiB
    python benchmarks/all_reduce.py --ranks 2 --mib 4 64 --json benchmarks/results/all_reduce.json

The three take turns in every round of one run, so that whatever else the machine does hits all alike; figures are
medians over rounds of the mean of back-to-back calls, timed on rank 0. The calling threads are pinned round-robin to
the usable cores, gloo's own threads are not. gloo runs over loopback TCP, whose speed depends on the congestion control
(BBR, the default of some machines, slows it by half): as root, the ranks run in a network namespace of their own with
"reno"; otherwise the control in force is printed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
INSIDE = "PHOTINUS_BENCH_NAMESPACE"


def rank_main(rank: int, world_size: int, store_file: str, sizes: list[int], rounds: int, out: str) -> None:
    """One rank: every size, every contender in turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("photinus", store=dist.FileStore(store_file, world_size), rank=rank, world_size=world_size)
    gloo = dist.new_group(backend="gloo")
    group = dist.group.WORLD
    assert group is not None
    allocate = group.allocate_tensor  # type: ignore[attr-defined]
    # This thread only: gloo's own threads, started above, stay free to run on the other cores.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    rows = []
    for size_bytes in sizes:
        elems = size_bytes // 4
        contenders = {
            "gloo": (gloo, torch.zeros(elems)),
            "photinus": (group, torch.zeros(elems)),
            "photinus arena": (group, allocate((elems,), dtype=torch.float32).zero_()),
        }
        calls = max(2, min(200, (64 << 20) // size_bytes))
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for round_index in range(rounds + 1):
            for name, (process_group, tensor) in contenders.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    dist.all_reduce(tensor, group=process_group)
                if round_index > 0:  # the first round warms up
                    times[name].append((time.perf_counter() - start) / calls)
        row: dict[str, Any] = {"ranks": world_size, "bytes": size_bytes}
        row.update({name: statistics.median(seconds) for name, seconds in times.items()})
        rows.append(row)
        if rank == 0:
            print(line(row), flush=True)
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    size = row["bytes"]
    name = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
    cells = [f"{row['ranks']:>5} {name:>8}"]
    for contender in ("gloo", "photinus", "photinus arena"):
        cells.append(f"{row[contender] * 1e6:>10.1f} us {size / row[contender] / 1e9:>6.2f} GB/s")
    cells.append(f"{row['gloo'] / row['photinus']:>6.1f} x {row['gloo'] / row['photinus arena']:>6.1f} x")
    return "  ".join(cells)


def enter_namespace() -> None:
    """As root, starts this program again in a network namespace of its own, with loopback up and control reno."""
    if os.environ.get(INSIDE) or os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        return
    script = f'ip link set lo up && echo reno > {CONTROL} && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, *sys.argv]
    sys.exit(subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode)


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    import torch

    model = [text for text in Path("/proc/cpuinfo").read_text().splitlines() if text.startswith("model name")]
    return {
        "processor": model[0].split(":")[1].strip() if model else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "congestion control": CONTROL.read_text().strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default 2 4)")
    parser.add_argument("--mib", type=float, nargs="+", default=[1 / 256, 1 / 16, 1, 4, 16, 64], help="sizes in MiB")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which all take turns (default 7)")
    parser.add_argument("--json", type=Path, help="also write the figures, with machine and date, to this file")
    arguments = parser.parse_args()
    enter_namespace()
    sizes = [int(mib * (1 << 20)) // 4 * 4 for mib in arguments.mib]
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if facts["congestion control"] != "reno":
        print("(not in a namespace with reno: gloo may be slower here than it need be; run as root to compare fairly)")
    print("ranks     size                   gloo               photinus         photinus arena   ratio  (arena)")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="photinus-bench-") as folder:
        for world_size in arguments.ranks:
            out = Path(folder, f"{world_size}.json")
            processes = [
                subprocess.Popen(
                    [
                        *(sys.executable, __file__, "--rank", str(rank), str(world_size)),
                        *(f"{folder}/store{world_size}", json.dumps(sizes), str(arguments.rounds), str(out)),
                    ],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                )
                for rank in range(world_size)
            ]
            codes = [process.wait(timeout=900) for process in processes]
            if any(codes):
                sys.exit("a rank failed; see its output above")
            rows += json.loads(out.read_text())
    if arguments.json:
        record = {
            "date": datetime.date.today().isoformat(),
            "command": "python " + " ".join(sys.argv),
            "machine": facts,
            "unit": "seconds per call, float32 sum",
            "rows": rows,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "--rank":
        _, _, own_rank, ranks, store, own_sizes, own_rounds, result = sys.argv
        rank_main(int(own_rank), int(ranks), store, json.loads(own_sizes), int(own_rounds), result)
    else:
        main()
