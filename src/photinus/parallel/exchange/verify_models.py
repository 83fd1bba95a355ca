"""Do all ranks hold the same model, on GPUs of their own? One small exchange answers, before all others.

Each rank describes its model in lines of text: one per parameter and buffer, in order. The ranks exchange a digest
of the text. Only where digests differ is the text itself exchanged, so that every rank can name the first line that
differs, and both sides. Nothing is pickled.

Later, digests of the parameters tell whether ranks still hold the same weights. Such a digest is the sum of the bytes'
64-bit words, modulo 2**64: it runs at the speed of memory on any device, and what it has to find are other values
(another learning rate, another optimizer, a weight that was set), not forgeries.
"""

from __future__ import annotations

import hashlib
import os
import socket
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ... import env
from ...errors import DeviceError, ModelMismatchError
from ...job.world import name_ranks
from .collectives import all_gather_bytes, gather_numbers
from .tensors import dense_strides

T = TypeVar("T")

_DIGEST_BYTES = 32
_GPU_BYTES = 128
_WORD_BYTES = 8


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
    own = hashlib.sha256(text).digest() + gpu.encode()[:_GPU_BYTES].ljust(_GPU_BYTES, b"\0")
    headers = all_gather_bytes(own, group, len(own))
    if len({header[:_DIGEST_BYTES] for header in headers}) > 1:
        texts = [other.decode() for other in all_gather_bytes(text, group)]
        raise ModelMismatchError(_difference([other.split("\n") for other in texts]))
    gpus = [header[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace") for header in headers]
    refuse_shared_gpus(gpus, str(dist.get_backend(group)), env.RANKS_PER_GPU.get())


def _difference(models: Sequence[Sequence[str]]) -> str:
    """Return a text on the first line in which the models differ: which ranks have which variant of it."""
    count = max(len(model) for model in models)
    at = [[model[i] if i < len(model) else "no further parameter or buffer" for model in models] for i in range(count)]
    variants = next(ranks_by(line) for line in at if len(set(line)) > 1)
    difference = "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in variants.items())
    counts = sorted({len(model) - 1 for model in models})  # but the first line, of options
    sizes = f" ({' and '.join(map(str, counts))} parameters and buffers)" if len(counts) > 1 else ""
    return (
        f"the ranks of this group hold different models{sizes}. First difference: {difference}. Build the same model "
        f"on every rank, with the same options, before wrapping it; what depends on the rank (data, seeds, devices) "
        f"must not change names, shapes, dtypes, order or requires_grad."
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
        text = f"ranks {', '.join(map(str, ranks))} all compute on {gpu}"
        if nccl and len(ranks) <= allowed:
            raise DeviceError(
                f"{text}, and nccl takes one rank per GPU. Use backend 'photinus' or 'gloo', or leave the choice."
            )
        raise DeviceError(
            f"{text}, but each rank needs one of its own: that of its local rank, which device 'auto' takes, and "
            f"torch.cuda.set_device(local_rank) before the model is made; or start fewer ranks. To let them share it "
            f"on purpose, over photinus or gloo: photinus run --ranks-per-gpu {len(ranks)}, or "
            f"{env.RANKS_PER_GPU.name}={len(ranks)} with other launchers."
        )


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor of any shape and dtype: int64, no dimension, on its device. Equal bytes, equal digests.

    Bytes in the order in which they lie: strides are equal on all ranks, which is compared when a model is wrapped.
    """
    data = _flat(tensor).view(torch.uint8)
    if data.storage_offset() % _WORD_BYTES:  # where it lies must not matter: it may lie elsewhere on another rank
        data = data.clone()
    whole = data.numel() // _WORD_BYTES * _WORD_BYTES
    return data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)


def hold_same_bytes(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> bool:
    """Return whether all ranks hold the same bytes in these tensors, whose shapes and dtypes are the same on all.

    The sum of a tensor's words does not see their order, so its CRC is compared, too. The same bytes are other values
    where strides differ.
    """
    parts = ((each.stride(), _flat(each).view(torch.uint8).cpu()) for each in tensors)
    own = repr([(strides, zlib.crc32(part.numpy().data), int(digest_of(part))) for strides, part in parts]).encode()
    return len(set(all_gather_bytes(hashlib.sha256(own).digest(), group, _DIGEST_BYTES))) == 1


def compare_parameters(pairs: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup, when: str = "") -> None:
    """Compares the values of all parameters between the ranks; every rank of the group calls it.

    Args:
        pairs: (name, parameter), the same names, shapes and dtypes in the same order on every rank.
        group: the ranks.
        when: begins the message, as in "after step 3 ".

    Raises:
        ModelMismatchError: on every rank, naming the first parameter that differs, and the ranks.
    """
    if not pairs:
        return
    own = torch.stack([digest_of(parameter).cpu() for _, parameter in pairs]).tolist()
    digests = torch.tensor(gather_numbers(own, group))
    differing = (digests != digests[0]).any(dim=0).nonzero().flatten().tolist()
    if not differing:
        return
    name, parameter = pairs[differing[0]]
    more = f" (and {len(differing) - 1} more of {len(pairs)} parameters)" if len(differing) > 1 else ""
    raise ModelMismatchError(
        f"{when}the ranks hold different weights: {_sides(digests[:, differing[0]].tolist())} in parameter {name} "
        f"{list(parameter.shape)}{more}. All ranks start from one model and make the "
        f"same steps, so something was done on some ranks only: another learning rate or optimizer, a step left out, "
        f"weights that were loaded or changed. Do it on all ranks, or on none. Where weights are to differ (local SGD, "
        f"processors that round differently), pass check_ranks=False to DistributedDataParallel or photinus.wrap. A "
        f"photinus.Loop saves no checkpoint of this."
    )


def _sides(by_rank: Sequence[int]) -> str:
    """Say which ranks hold what. Which of them is wrong is known only if most ranks agree."""
    sides = ranks_by(by_rank)
    most = max(sides.values(), key=len)
    others = [rank for rank in range(len(by_rank)) if rank not in most]
    if len(most) > len(others):
        return f"{name_ranks(others)} {'have' if len(others) > 1 else 'has'} other values than {name_ranks(most)}"
    return f"{' and '.join(map(name_ranks, sides.values()))} have different values"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which they lie: one dimension, no copy unless there are gaps between them."""
    tensor = tensor.detach().resolve_conj().resolve_neg()  # lazy ones cannot be read as bytes
    is_dense = dense_strides(tensor) == tensor.stride()
    return tensor.as_strided((tensor.numel(),), (1,)) if is_dense else tensor.contiguous().view(-1)


def ranks_by(values: Iterable[T]) -> dict[T, list[int]]:
    """The ranks that have each value, where `values` has one per rank."""
    ranks: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks
