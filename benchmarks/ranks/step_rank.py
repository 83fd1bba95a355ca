"""A rank that trains: step_rank.py WRAPPER BACKEND RANK WORLD_SIZE FOLDER

WRAPPER is torch (its DistributedDataParallel), photinus (ours), none (the bare model), zero2 or zero3 (our strategies),
or hand2 or hand3: FSDP2's fully_shard, called by hand over the same units, which keeps parameters from forward to
backward or does not. Split models step AdamW.

Paths: sync, a whole step; no_sync, the same without any exchange; in_step, the same and then one number is exchanged,
so that each rank waits for the slowest in every step, as it does wherever gradients are exchanged; forward, no more
than the way to the loss.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import models
import rank_loop
import torch
import torch.distributed as dist
from torch import nn

import photinus


def wrapped(model: nn.Module, wrapper: str) -> Any:
    """The model in its wrapper, made in the way that its users make it."""
    if wrapper == "torch":
        return nn.parallel.DistributedDataParallel(model)
    return photinus.DistributedDataParallel(model) if wrapper == "photinus" else model


def split(model: nn.Module, kind: str) -> tuple[Any, Any]:
    """A split model and its optimizer."""
    if kind.startswith("zero"):
        return photinus.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-6), strategy=kind)
    from torch.distributed.fsdp import fully_shard

    from photinus.parallel.zero.units import shard_units

    for unit in [*shard_units(model), model]:
        fully_shard(unit, reshard_after_forward=kind == "hand3")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-6)


def main(wrapper: str, backend: str, rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    work = dist.all_reduce(torch.ones(1), async_op=True)  # libraries start their threads now, which stay free
    assert work is not None
    work.wait()
    rank_loop.pin(rank)
    held: list[Any] = []
    is_split = wrapper.startswith(("zero", "hand"))

    def prepare(name: str, _: int) -> None:
        held.clear()
        model, inputs = models.make(name)
        ddp, optimizer = split(model, wrapper) if is_split else (wrapped(model, wrapper), None)
        held.extend((ddp, optimizer or torch.optim.SGD(ddp.parameters(), lr=1e-6), inputs))
        dist.barrier()

    def step_of(path: str) -> Callable[[], None]:
        ddp, optimizer, inputs = held
        quiet = ddp.no_sync if path != "sync" and wrapper != "none" else contextlib.nullcontext
        number = torch.zeros(1)

        def forward() -> None:
            with quiet():
                ddp(*inputs)

        def step() -> None:
            with quiet():
                ddp(*inputs).backward()
            if path == "in_step":
                dist.all_reduce(number)
            optimizer.step()
            optimizer.zero_grad()

        return forward if path == "forward" else step

    what = wrapper if is_split else f"{wrapper} DDP"
    version = f"{what} over {backend}, torch {torch.__version__}, photinus {photinus.__version__}"
    rank_loop.serve(rank, folder, version, prepare, step_of, dist.barrier)
    held.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
