"""A rank of torch.distributed on one of several hosts: host_rank.py BACKEND[-WIRE_DTYPE] FOLDER

Rank, world size and the store's address come from the environment (env://). Paths are operations: all_reduce and so on.
FOLDER/RANK.before tells what memory it had before the group was made.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path

import rank_loop
import torch
import torch.distributed as dist

import photinus  # noqa: F401  # in all ranks, so that memory can be compared
from photinus.backend import Options


def main(backend: str, folder: str) -> None:
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(folder, f"{rank}.before").write_text(Path("/proc/self/smaps_rollup").read_text())
    backend, _, wire = backend.partition("-")
    dist.init_process_group(backend, pg_options=Options(getattr(torch, wire)) if wire else None)
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    if not bool((ones == world_size).all()):
        raise RuntimeError(f"the sum of {world_size} ones came out as {ones.min().item()} to {ones.max().item()}")
    rank_loop.pin(rank)
    whole = torch.zeros(0)

    def prepare(dtype_name: str, size_bytes: int) -> None:
        nonlocal whole
        dtype = getattr(torch, dtype_name)
        whole = torch.zeros(0)  # frees the old one first
        whole = torch.zeros(size_bytes // dtype.itemsize, dtype=dtype)
        dist.barrier()

    def call_of(path: str) -> Callable[[], object]:
        if path == "all_reduce":
            return lambda: dist.all_reduce(whole)
        if path == "broadcast":
            return lambda: dist.broadcast(whole, 0)
        part = torch.zeros(len(whole) // world_size, dtype=whole.dtype)
        divided = whole[: len(part) * world_size]
        if path == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(part, divided)
        assert path == "all_gather"
        return lambda: dist.all_gather_into_tensor(divided, part)

    version = f"torch {torch.__version__}"
    if backend == "photinus":
        version = f"photinus {importlib.metadata.version('photinus')} in {version}"
    rank_loop.serve(rank, folder, version, prepare, call_of, dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
