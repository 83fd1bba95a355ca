"""Checks of the wrapper's arguments: the models and devices that it takes, and what each argument means."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from ...errors import UnsuitableModelError
from ..exchange.collectives import resolve_group
from ..reducer.buckets import DEFAULT_BUCKET_CAP_BYTES

_MIB = 1024 * 1024


def one_device(parameters: Sequence[tuple[str, nn.Parameter]], module: nn.Module) -> torch.device:
    """The device of all parameters. Refuses models that cannot be wrapped (see the class's `Raises`)."""
    everything: list[tuple[str, torch.Tensor]] = [*parameters, *module.named_buffers()]
    lazy = [n for n, t in everything if is_lazy(t)]
    if lazy:
        raise UnsuitableModelError(
            f"{_few(lazy)} not initialised yet (lazy modules). Run one forward on sample data before wrapping."
        )
    split = [n for n, t in everything if hasattr(t, "full_tensor")]
    if split:
        raise UnsuitableModelError(
            f"{_few(split)} split over the ranks already, as fully_shard and strategies zero2 and zero3 do. Wrap the "
            f"whole model once, by one of them."
        )
    # Of a parameter the optimizer says so, too; a buffer would fail where it arrives, on all ranks but the first.
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    buffers = [(n, b) for n, b in module.named_buffers() if n not in ignored]
    expanded = [n for n, b in buffers if any(b.stride(d) == 0 < b.size(d) - 1 for d in range(b.dim()))]
    if expanded:
        raise UnsuitableModelError(
            f"{_few(expanded)} expanded: several elements have one place in memory, so other ranks' values cannot be "
            f"written there. Register buffer.contiguous() instead."
        )
    if not any(p.requires_grad for _, p in parameters):
        raise UnsuitableModelError(
            f"{type(module).__name__} has no parameter that requires grad ({len(parameters)} parameters), so there is "
            f"nothing to average. Use it unwrapped, or unfreeze what is to be trained."
        )
    devices: dict[torch.device, str] = {}
    for name, parameter in parameters:
        devices.setdefault(parameter.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise UnsuitableModelError(
            f"all parameters must be on one device, but {places}. Move the model with .to(device) first."
        )
    device = next(iter(devices))
    if device.type == "meta":
        raise UnsuitableModelError(
            "the parameters are on the meta device and hold nothing; materialise the model before wrapping"
        )
    return device


def device_to_move_to(
    device_ids: Sequence[int | str | torch.device] | None, module: nn.Module, gpus: int
) -> torch.device | None:
    """The GPU that a model on the CPU is to be moved to: the one that `device_ids` names, if there is such a GPU.

    Raises:
        UnsuitableModelError: this process sees GPUs, but not that one.
    """
    if not device_ids or len(device_ids) > 1 or not gpus or any(p.device.type != "cpu" for p in module.parameters()):
        return None
    device = torch.device("cuda", device_ids[0]) if isinstance(device_ids[0], int) else torch.device(device_ids[0])
    if device.type != "cuda":
        return None
    if (device.index or 0) >= gpus:
        raise UnsuitableModelError(
            f"device_ids={list(device_ids)}, but this process sees {gpus} GPU{'s' if gpus > 1 else ''}: start fewer "
            f"processes on this host, or look at CUDA_VISIBLE_DEVICES"
        )
    return device


def check_device_ids(
    device_ids: Sequence[int | str | torch.device] | None,
    output_device: int | str | torch.device | None,
    device: torch.device,
) -> list[torch.device] | None:
    """The device to which inputs are moved, in a list; None where they are left alone.

    Raises:
        UnsuitableModelError: they name several devices, or another than that of the parameters.
    """
    if not device_ids:
        if output_device is not None:
            raise UnsuitableModelError(
                f"output_device={output_device} needs device_ids to name the same device; leave both out"
            )
        return None
    if len(device_ids) > 1:
        raise UnsuitableModelError(
            f"device_ids={list(device_ids)}: one process drives one device. Start a process per device "
            f"(`photinus run --nproc-per-node {len(device_ids)} …`) and give each one id, or None."
        )
    if device.type == "cpu":
        raise UnsuitableModelError(
            f"device_ids={list(device_ids)}, but the model is on the CPU, and this process sees no such GPU to move it "
            f"to: leave device_ids out where a script is to run on CPUs"
        )
    devices = [
        torch.device(device.type, d) if isinstance(d, int) else torch.device(d)
        for d in (device_ids[0], device_ids[0] if output_device is None else output_device)
    ]
    for name, value in zip(("device_ids", "output_device"), devices, strict=True):
        if value.type != device.type or value.index not in (None, device.index):
            raise UnsuitableModelError(f"{name} is {value}, but the model is on {device}; they must be the same device")
    return [device]


def sparse_parameters(module: nn.Module) -> frozenset[str]:
    """Names of the parameters whose gradients will be sparse."""
    makers = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    return frozenset(name for name, parameter in module.named_parameters() if id(parameter) in makers)


def check_wire_dtype(wire_dtype: torch.dtype | None, backend: str) -> None:
    """Check that gradients can travel between hosts in this type.

    Raises:
        UnsuitableModelError: they cannot, or not over this backend.
    """
    if wire_dtype is None:
        return
    if wire_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UnsuitableModelError(
            f"wire_dtype={wire_dtype!r}: gradients can travel between hosts as torch.bfloat16 or torch.float16 "
            f"(float32 ones, in half the bytes) or as torch.float32 (16-bit ones, unrounded)"
        )
    if backend != "photinus":
        raise UnsuitableModelError(
            f"wire_dtype={wire_dtype} is for backend photinus, and {backend} exchanges these gradients. Leave it out, "
            f"or register a hook of torch.distributed.algorithms.ddp_comm_hooks, such as "
            f"default_hooks.bf16_compress_hook"
        )


def _few(names: Sequence[str]) -> str:
    text = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{text} {'is' if len(names) == 1 else 'are'}"


def group_of(process_group: dist.ProcessGroup | None, device_mesh: Any, module: nn.Module) -> dist.ProcessGroup:
    """See `resolve_group`, which says what it raises.

    A mesh that is cut out of a larger one means that `module` is sharded along the others: torch's DTensor parameters
    are then replaced by their local parts, as torch's class does.
    """
    group = resolve_group(process_group, device_mesh)
    if device_mesh is not None and device_mesh._get_root_mesh() != device_mesh:
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    return group


def capacities(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> tuple[int, list[int]]:
    """The cap of a bucket in bytes, and the list of caps, empty where there is none.

    Raises:
        UnsuitableModelError: a cap that is not above 0.
    """
    if cap_mb is None and not cap_mb_list:
        return DEFAULT_BUCKET_CAP_BYTES, []
    caps: Sequence[Any] = cap_mb_list or (cap_mb,)
    if not all(isinstance(cap, numbers.Real) and float(cap) > 0 for cap in caps):  # numpy's numbers are real, too
        raise UnsuitableModelError(
            f"bucket_cap_mb={cap_mb!r}, bucket_cap_mb_list={cap_mb_list}: a bucket needs a size in MiB, above 0"
        )
    sizes = [max(1, int(cap * _MIB)) for cap in caps]
    return max(sizes), sizes if cap_mb_list else []


def buffer_sync_options(broadcast: bool | None, forward_sync: bool | None) -> tuple[bool, bool]:
    """Return whether buffers are synchronised before forwards, and whether at construction."""
    if broadcast is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated, as in torch 2.13: use `forward_sync_buffers`"
            + (", which is given too and wins" if forward_sync is not None else "")
            + ". (Only broadcast_buffers=False leaves buffers alone at construction too.)",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync is not None:
        return forward_sync, True
    synced = True if broadcast is None else broadcast
    return synced, synced
