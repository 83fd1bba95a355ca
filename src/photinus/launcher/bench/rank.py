"""A rank of one backend: rank.py BACKEND RANK WORLD_SIZE FOLDER DTYPE DEVICE

Reads commands from standard input and answers each with a line of JSON; asleep in it while others have their turn:

    prepare OPERATION BYTES    makes tensors
    run CALLS                  a few to warm up, then the mean of so many
    quit

BACKEND may be "copy": no collective at all, each rank copies as many bytes from one tensor to another. A file of its
own; imports torch and nothing of Photinus, as a user's script would.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


def operation(name: str, elems: int, dtype: torch.dtype, device: torch.device, world_size: int) -> Callable[[], object]:
    """The call to measure, on tensors of its own; `elems` is the size of the whole tensor, divisible by the world's."""

    def zeros(count: int) -> torch.Tensor:
        group = dist.group.WORLD if dist.is_initialized() else None
        offered = getattr(group, "allocate_tensor", None)
        if offered is not None and device.type == "cpu":
            tensor: torch.Tensor = offered(count, dtype)
            return tensor.zero_()
        return torch.zeros(count, dtype=dtype, device=device)

    part = elems // world_size
    if name == "all_reduce":
        whole = zeros(elems)
        return lambda: dist.all_reduce(whole)
    if name == "broadcast":
        whole = zeros(elems)
        return lambda: dist.broadcast(whole, 0)
    if name == "reduce_scatter":
        mine, whole = zeros(part), zeros(elems)
        return lambda: dist.reduce_scatter_tensor(mine, whole)
    if name == "all_gather":
        mine, whole = zeros(part), zeros(elems)
        return lambda: dist.all_gather_into_tensor(whole, mine)
    if name == "all_to_all":
        given, got = zeros(elems), zeros(elems)
        return lambda: dist.all_to_all_single(got, given)
    assert name == "copy", name
    source, target = (torch.zeros(elems, dtype=dtype, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def main(backend: str, rank: int, world_size: int, folder: str, dtype_name: str, device_type: str) -> None:
    """Answers until `quit` or the end of the input."""
    torch.set_num_threads(1)
    dtype: torch.dtype = getattr(torch, dtype_name)
    device = torch.device("cpu")
    if backend == "nccl" or device_type == "cuda":
        # nccl takes one rank per GPU, and says so where there are fewer; others share.
        device = torch.device("cuda", rank if backend == "nccl" else rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo" if backend == "copy" else backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=float(os.environ.get("PHOTINUS_TIMEOUT_S", "300"))),
    )
    call: Callable[[], object] = dist.barrier

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def measured(calls: int) -> float:
        for _ in range(calls // 10 + 1):
            call()
        settle()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        settle()
        return (time.perf_counter() - start) / calls

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "prepare":
            call = operation("copy" if backend == "copy" else words[0], int(words[1]), dtype, device, world_size)
            call()
            settle()
            print(json.dumps({}), flush=True)
        elif verb == "run":
            print(json.dumps({"s": measured(int(words[0]))}), flush=True)
        else:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], sys.argv[6])
