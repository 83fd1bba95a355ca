"""One of the processes that try a backend: trial.py BACKEND RANK WORLD_SIZE FOLDER TIMEOUT_S

Makes a process group over a file store in FOLDER, checks an all_reduce of ones, times a small and a large one, and
prints one line of JSON. A file of its own; imports torch and nothing of Photinus, as a user's script would.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SMALL_ELEMS, LARGE_ELEMS = 1024, 4 << 20  # 4 KiB and 16 MiB of float32
SMALL_CALLS, LARGE_CALLS = 200, 5


def seconds_per_call(tensor: torch.Tensor, calls: int) -> float:
    """Mean time of an all_reduce."""

    def wait() -> None:
        if tensor.is_cuda:
            torch.cuda.synchronize()

    for _ in range(max(1, calls // 5)):
        dist.all_reduce(tensor)
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor)
    wait()
    return (time.perf_counter() - start) / calls


def main(backend: str, rank: int, world_size: int, folder: str, timeout_s: float) -> None:
    """Tries it and prints what came of it."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(  # type: ignore[attr-defined]
        f"{folder}/store", world_size
    )
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    ones = torch.ones(LARGE_ELEMS, device=device)
    dist.all_reduce(ones)
    if not bool((ones == world_size).all()):
        raise RuntimeError(f"the sum of {world_size} ones came out as {ones.min().item()} to {ones.max().item()}")
    ones.zero_()
    small = seconds_per_call(ones[:SMALL_ELEMS].clone(), SMALL_CALLS)
    large = seconds_per_call(ones, LARGE_CALLS)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"small_s": small, "large_s": large, "large_bytes": LARGE_ELEMS * 4}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
