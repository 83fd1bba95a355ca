"""A rank of a backend of torch.distributed: torch_rank.py BACKEND RANK WORLD_SIZE FOLDER

A path is an operation, on tensors as the backend offers them (photinus: in its arena), or OPERATION:ordinary. Imports
nothing of Photinus, as a user's script would.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import rank_loop
import torch
import torch.distributed as dist


def _operation(path: str, elems: int, dtype: torch.dtype, world_size: int) -> Callable[[], object]:
    """The call to measure, on tensors of its own; `elems` is the size of the whole tensor."""
    name, _, kind = path.partition(":")
    offered = getattr(dist.group.WORLD, "allocate_tensor", None)

    def zeros(count: int) -> torch.Tensor:
        if offered is not None and kind != "ordinary":
            tensor: torch.Tensor = offered((count,), dtype=dtype)
            return tensor.zero_()
        return torch.zeros(count, dtype=dtype)

    whole = zeros(elems)
    part = zeros(elems if name == "all_to_all" else elems // world_size)
    if name == "all_reduce":
        ones = zeros(min(elems, 4 << 20)).fill_(1)
        dist.all_reduce(ones)
        if not bool((ones == world_size).all()):
            raise RuntimeError(f"the sum of {world_size} ones came out as {ones.min().item()} to {ones.max().item()}")
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "all_to_all": lambda: dist.all_to_all_single(part, whole),
    }
    return calls[name]


def main(backend: str, rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=float(os.environ.get("PHOTINUS_TIMEOUT_S", "300"))),
    )
    rank_loop.pin(rank)  # this thread only: gloo's own threads, started above, stay free to run on the other cores
    calls: dict[str, Callable[[], object]] = {}
    of_what: tuple[torch.dtype, int] = (torch.float32, 1)

    def prepare(dtype_name: str, size_bytes: int) -> None:
        nonlocal of_what
        calls.clear()
        of_what = getattr(torch, dtype_name), size_bytes
        dist.barrier()

    def call_of(path: str) -> Callable[[], object]:
        dtype, size_bytes = of_what
        if path not in calls:
            calls[path] = _operation(path, size_bytes // dtype.itemsize, dtype, world_size)
        return calls[path]

    version = f"torch {torch.__version__}"
    if backend == "photinus":
        version = f"photinus {importlib.metadata.version('photinus')} in {version}"
    rank_loop.serve(rank, folder, version, prepare, call_of, dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
