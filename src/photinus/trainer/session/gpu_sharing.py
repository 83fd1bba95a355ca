"""Two ranks on one GPU are refused before they exchange anything: nccl would say it later, in words of its own.

What each rank computes on goes by the group's store, since an exchange would be the very thing that fails.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ... import env
from ...parallel.exchange.gpu_sharing import gpu_identity, refuse_shared_gpus

__all__ = ["check_gpus"]

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
    refuse_shared_gpus([store.get(key).decode() for key in keys], backend, env.RANKS_PER_GPU.get())
