"""A rank of a backend of torch.distributed: rank.py BACKEND RANK WORLD_SIZE FOLDER DEVICE [--pin]

Asleep in a read from FOLDER/RANK.in until told to run; answers each command with a line of JSON on FOLDER/RANK.out:

    prepare TYPE BYTES   frees the tensors; the next ones are of so many bytes
    run PATH CALLS       a tenth as many to warm up, then the mean of so many
    quit

A path is an operation, on tensors as the backend offers them (photinus: in its arena), or OPERATION:ordinary. "copy"
is no collective: each rank copies as many bytes from one tensor to another, or from a GPU to the host and back;
"copy:threads" does so with all cores, for one does not fill the channels of a server's memory. A file of its own;
imports nothing of Photinus, as a user's script would, and torch only as a program: contestants without torch use
`serve`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def pin(rank: int) -> None:
    """Binds this thread, and none that runs already, to the usable core whose turn it is."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _open(pipe: str, flags: int) -> int:
    """Opens a pipe whose other end is open: to wait for that would be for ever, if who asks was killed meanwhile."""
    opened = os.open(pipe, flags | os.O_NONBLOCK)
    os.set_blocking(opened, True)
    return opened


def serve(
    rank: int,
    folder: str,
    version: str,
    prepare: Callable[[str, int], None],
    call_of: Callable[[str], Callable[[], object]],
    barrier: Callable[[], object],
    settle: Callable[[], object] = lambda: None,
) -> None:
    """Answers commands, by the pipes of this rank in the folder, until `quit` or their end.

    Args:
        version: what the contestant is, for the report.
        prepare: frees tensors, and makes new ones of (type, bytes) now or in `call_of`.
        call_of: the function without arguments that does one call on a path.
        barrier: returns when all ranks have called it.
        settle: returns when what was called is done.
    """
    out, commands_in = _open(f"{folder}/{rank}.out", os.O_WRONLY), _open(f"{folder}/{rank}.in", os.O_RDONLY)
    with open(out, "w") as answers, open(commands_in) as commands:

        def answer(**facts: object) -> None:
            print(json.dumps(facts), file=answers, flush=True)

        answer(ready=version)
        gc.disable()
        for line in commands:
            verb, *words = line.split()
            if verb == "prepare":
                prepare(words[0], int(words[1]))
                answer()
            elif verb == "run":
                call, calls = call_of(words[0]), int(words[1])
                for _ in range(calls // 10 + 1):
                    call()
                settle()
                barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                settle()
                answer(s=(time.perf_counter() - start) / calls)
            else:
                return


_CHUNK_BYTES, _PLACES = 2 << 20, 8
"""Chunks large enough for Python to queue them faster than they are copied, in as much memory as a reduction takes."""


def through_host(tensor: Any) -> Callable[[], object]:
    """A call that copies a GPU's tensor to locked memory of the host and back, chunk by chunk, both ways at once.

    The least that carries it over the link both ways, as each rank does in an all_reduce through the host: nothing is
    added, nobody is waited for. The host only queues it.
    """
    import torch

    device: Any = torch.cuda if tensor.is_cuda else torch.cpu  # the CPU's streams and events do nothing
    parts = tensor.view(-1).view(torch.uint8).split(_CHUNK_BYTES)
    ring = torch.empty(_PLACES, _CHUNK_BYTES, dtype=torch.uint8, pin_memory=tensor.is_cuda)
    out, back = device.Stream(), device.Stream()
    landed, returned = ([device.Event() for _ in range(_PLACES)] for _ in range(2))

    def call() -> None:
        for number, part in enumerate(parts):
            place = number % _PLACES
            there = ring[place, : part.numel()]
            with device.stream(out):
                out.wait_event(returned[place])
                there.copy_(part, non_blocking=True)
                landed[place].record(out)
            with device.stream(back):
                back.wait_event(landed[place])
                part.copy_(there, non_blocking=True)
                returned[place].record(back)

    return call


def _operation(path: str, elems: int, dtype: Any, device: Any, world_size: int) -> Callable[[], object]:
    """The call to measure, on tensors of its own; `elems` is the size of the whole tensor."""
    import torch
    import torch.distributed as dist

    name, _, kind = path.partition(":")
    offered = getattr(dist.group.WORLD, "allocate_tensor", None)

    def zeros(count: int) -> torch.Tensor:
        if offered is not None and device.type == "cpu" and kind != "ordinary":
            tensor: torch.Tensor = offered((count,), dtype=dtype)
            return tensor.zero_()
        return torch.zeros(count, dtype=dtype, device=device)

    if kind == "threads":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    whole = zeros(elems)
    if name == "copy" and device.type == "cuda":
        return through_host(whole)
    part = zeros(elems if name in ("copy", "all_to_all") else elems // world_size)
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
        "copy": lambda: part.copy_(whole),
    }
    return calls[name]


def main(backend: str, rank: int, world_size: int, folder: str, device_type: str, pinned: bool) -> None:
    """Serves as a rank of torch.distributed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl" or device_type == "cuda":
        # nccl takes one rank per GPU, and says so where there are fewer; others share.
        device = torch.device("cuda", rank if backend == "nccl" else rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if backend == "copy" else backend,
        store=dist.FileStore(f"{folder}/store", world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=float(os.environ.get("PHOTINUS_TIMEOUT_S", "300"))),
    )
    if pinned:
        pin(rank)  # this thread only: gloo's own threads, started above, stay free to run on the other cores
    calls: dict[str, Callable[[], object]] = {}
    of_what: tuple[Any, int] = (torch.float32, 1)

    def prepare(dtype_name: str, size_bytes: int) -> None:
        nonlocal of_what
        calls.clear()
        of_what = getattr(torch, dtype_name), size_bytes
        dist.barrier()

    def call_of(path: str) -> Callable[[], object]:
        dtype, size_bytes = of_what
        if path not in calls:
            calls[path] = _operation(path, size_bytes // dtype.itemsize, dtype, device, world_size)
        return calls[path]

    version = f"torch {torch.__version__}"
    if backend == "photinus":
        import importlib.metadata

        version = f"photinus {importlib.metadata.version('photinus')} in {version}"
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    serve(rank, folder, version, prepare, call_of, dist.barrier, settle)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5], "--pin" in sys.argv)
