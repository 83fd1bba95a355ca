"""Two ranks on one GPU are refused before they exchange anything: nccl would say it later, in words of its own.

What each rank computes on goes by the group's store, since an exchange would be the very thing that fails.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .. import env
from ..errors import DeviceError

__all__ = ["check_gpus", "gpu_identity", "refuse_shared_gpus"]

_checks = 0  # sessions of this process, equal on all ranks: each has keys of its own


def check_gpus(device: torch.device, backend: str) -> None:
    """Every rank of the default group calls it with its CUDA device.

    Raises:
        DeviceError: on every rank, if more ranks share a GPU than PHOTINUS_RANKS_PER_GPU allows, or any over nccl.
    """
    global _checks
    _checks += 1
    store: Any = dist.distributed_c10d._get_default_store()
    keys = [f"photinus/gpu/{_checks}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], gpu_identity(device))
    store.wait(keys, timedelta(seconds=env.TIMEOUT_S.get()))
    refuse_shared_gpus([each.decode() for each in store.multi_get(keys)], backend, env.RANKS_PER_GPU.get())


def gpu_identity(device: torch.device) -> str:
    """Words for a GPU that are equal for two processes exactly when it is the same one."""
    properties: Any = torch.cuda.get_device_properties(device)
    # The number says nothing by itself: CUDA_VISIBLE_DEVICES may differ from rank to rank.
    which = getattr(properties, "uuid", None) or f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}:{device.index}"
    return f"GPU {which} ({properties.name}) of host {socket.gethostname()}"


def refuse_shared_gpus(by_rank: Sequence[str], backend: str, allowed: int) -> None:
    """Raises DeviceError where more than `allowed` ranks have the same GPU, or any two over nccl.

    Args:
        by_rank: each rank's GPU, as `gpu_identity` says.
        backend: of the group.
        allowed: ranks per GPU.
    """
    sharing: dict[str, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(by_rank):
        sharing[gpu].append(rank)
    nccl = "nccl" in backend
    for gpu, ranks in sharing.items():
        if len(ranks) <= (1 if nccl else allowed):
            continue
        told = f"ranks {', '.join(map(str, ranks))} all compute on {gpu}"
        if nccl and len(ranks) <= allowed:
            raise DeviceError(f"{told}, and nccl takes one rank per GPU. Use backend 'gloo', or leave the choice.")
        raise DeviceError(
            f"{told}, but each rank needs one of its own. Leave device at 'auto' (the local rank's), or start fewer "
            f"ranks. To let them share it on purpose, over gloo: photinus run --ranks-per-gpu {len(ranks)}, or "
            f"{env.RANKS_PER_GPU.name}={len(ranks)} with other launchers."
        )
