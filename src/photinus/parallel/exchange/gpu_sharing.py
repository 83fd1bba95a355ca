"""Which GPU does a rank compute on, and may others compute on it, too?"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from ... import env
from ...errors import DeviceError


def gpu_identity(device: torch.device) -> str:
    """Words for a GPU that are equal for two processes exactly when it is the same one; "" for other devices."""
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    # The number says nothing by itself: CUDA_VISIBLE_DEVICES may differ from rank to rank.
    which = getattr(properties, "uuid", None) or f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}:{device.index}"
    return f"GPU {which} ({properties.name}) of host {socket.gethostname()}"


def refuse_shared_gpus(by_rank: Sequence[str], backend: str, allowed: int) -> None:
    """Raises DeviceError where more than `allowed` ranks have the same GPU, or any two over nccl."""
    sharing: dict[str, list[int]] = defaultdict(list)
    for rank, gpu in enumerate(by_rank):
        if gpu:
            sharing[gpu].append(rank)
    nccl = "nccl" in backend
    for gpu, ranks in sharing.items():
        if len(ranks) <= (1 if nccl else allowed):
            continue
        told = f"ranks {', '.join(map(str, ranks))} all compute on {gpu}"
        if nccl and len(ranks) <= allowed:
            raise DeviceError(
                f"{told}, and nccl takes one rank per GPU. Use backend 'photinus' or 'gloo', or leave the choice."
            )
        raise DeviceError(
            f"{told}, but each rank needs one of its own: that of its local rank, which device 'auto' takes, and "
            f"torch.cuda.set_device(local_rank) before the model is made; or start fewer ranks. To let them share it "
            f"on purpose, over photinus or gloo: photinus run --ranks-per-gpu {len(ranks)}, or "
            f"{env.RANKS_PER_GPU.name}={len(ranks)} with other launchers."
        )
