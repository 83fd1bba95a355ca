"""A rank whose memory is watched: memory_rank.py WRAPPER BACKEND RANK WORLD_SIZE FOLDER MIB STEPS [--views]

Says in FOLDER when it is ready and done, and waits there for go and leave.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import photinus

WIDTH = 2048


def main(
    wrapper: str, backend: str, rank: int, world_size: int, folder: str, mib: int, steps: int, views: bool
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    warm = photinus.DistributedDataParallel(nn.Linear(8, 8)) if wrapper == "photinus" else nn.Linear(8, 8)
    warm(torch.ones(1, 8)).sum().backward()
    dist.all_reduce(torch.ones(1 << 20))
    said, waited = say_and_wait(folder, rank)
    said("ready")
    waited("go")
    layers = mib * (1 << 20) // (4 * WIDTH * WIDTH)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    if wrapper == "torch":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
    elif wrapper == "photinus":
        model = photinus.DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    said("done")
    waited("leave")
    dist.destroy_process_group()


def say_and_wait(folder: str, rank: int) -> tuple[Any, Any]:
    def said(what: str) -> None:
        Path(folder, f"{what}.{rank}").touch()

    def waited(what: str) -> None:
        while not Path(folder, what).exists():
            time.sleep(0.005)

    return said, waited


if __name__ == "__main__":
    numbers = [int(word) for word in (*sys.argv[3:5], *sys.argv[6:8])]
    main(sys.argv[1], sys.argv[2], numbers[0], numbers[1], sys.argv[5], *numbers[2:], "--views" in sys.argv)
