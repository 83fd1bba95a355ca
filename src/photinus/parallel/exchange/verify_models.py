"""Do all ranks hold the same model, on GPUs of their own? One small exchange answers, before all others.

Each rank describes its model in lines of text: one per parameter and buffer, in order. The ranks exchange a digest
of the text. Only where digests differ is the text itself exchanged, so that every rank can name the first line that
differs, and both sides. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ... import env
from ...errors import DeviceError, ModelMismatchError
from ...job.world import name_ranks
from .collectives import all_gather_bytes
from .tensors import dense_strides

T = TypeVar("T")

_DIGEST_BYTES = 32
_GPU_BYTES = 128


def describe(kind: str, name: str, tensor: torch.Tensor) -> str:
    """One line on a parameter or buffer: name, dtype, shape, and what else has to agree."""
    line = f"{kind} {name}: {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if kind == "buffer":
        return line
    strides = dense_strides(tensor)  # gradients lie in their bucket as the parameter does
    if strides != torch.empty(tensor.shape, device="meta").stride():
        line += f", strides {list(strides)}"
    return line + (", requires grad" if tensor.requires_grad else ", frozen")


def verify_same_model(lines: Iterable[str], group: dist.ProcessGroup, gpu: str = "") -> None:
    """Compares the ranks' descriptions of their models; returns when all are equal.

    Args:
        lines: this rank's description, one line per parameter and buffer, in order.
        gpu: the one that the model is on, see `gpu_identity`.

    Raises:
        ModelMismatchError: on every rank, naming the first line that differs and what both sides have.
        DeviceError: on every rank, if more ranks have the same GPU than PHOTINUS_RANKS_PER_GPU allows.
    """
    text = "\n".join(lines).encode()
    mine = hashlib.sha256(text).digest() + gpu.encode()[:_GPU_BYTES].ljust(_GPU_BYTES, b"\0")
    headers = all_gather_bytes(mine, group, len(mine))
    if len({header[:_DIGEST_BYTES] for header in headers}) > 1:
        texts = [other.decode() for other in all_gather_bytes(text, group)]
        raise ModelMismatchError(_difference([other.split("\n") for other in texts], group.rank()))
    gpus = [header[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace") for header in headers]
    refuse_shared_gpus(gpus, str(dist.get_backend(group)), env.RANKS_PER_GPU.get())


def _difference(models: Sequence[Sequence[str]], rank: int) -> str:
    """The first line in which the models differ, from the view of rank 0, told so that each rank finds itself in it."""
    count = max(len(model) for model in models)
    at = [[model[i] if i < len(model) else None for model in models] for i in range(count)]
    line = next(i for i in range(count) if len(set(at[i])) > 1)
    told = "; ".join(
        f"{name_ranks(ranks)}: {'nothing more' if text is None else text}" for text, ranks in ranks_by(at[line]).items()
    )
    counts = sorted({len(model) for model in models})
    sizes = f" (the models have {' and '.join(map(str, counts))} lines)" if len(counts) > 1 else ""
    return (
        f"the ranks of this group hold different models; seen from rank {rank}, the first difference is line {line + 1}"
        f"{sizes}: {told}. Build the same model on every rank, with the same options, before wrapping it; what depends "
        f"on the rank (data, seeds, devices) must not change names, shapes, dtypes, order or requires_grad."
    )


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
    nccl = "nccl" in backend
    for gpu, ranks in ranks_by(by_rank).items():
        if not gpu or len(ranks) <= (1 if nccl else allowed):
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


def ranks_by(values: Iterable[T]) -> dict[T, list[int]]:
    """The ranks that have each value, where `values` has one per rank."""
    ranks: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks
