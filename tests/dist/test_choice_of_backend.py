"""Ranks that torchrun started agree on their backend at the store at which they meet anyway."""

from __future__ import annotations

import socket
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist

from photinus.job.world import World
from photinus.trainer.session import session
from tests.ranks import run_ranks, values


def test_ranks_that_share_a_gpu_meet_over_photinus_and_exchange() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PHOTINUS_RANKS_PER_GPU": "2"}
    found = values(run_ranks(f"{__name__}:_meet", world_size=2, environ=environ))
    assert found == [["photinus", True, "photinus", 3.0]] * 2


def _meet(rank: int, world_size: int) -> tuple[str, bool, str, float]:
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="the one", name="GPU")  # type: ignore[assignment]
    torch.cuda.device_count = lambda: 1
    device = torch.device("cuda", 0)
    backend, why = session._make_group(World.from_env(), device, "auto", "", timedelta(seconds=30))
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    made = str(dist.get_backend())
    dist.destroy_process_group()
    return backend, "ranks share one" in why, made, tensor.item()
