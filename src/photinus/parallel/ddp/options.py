"""What the wrapper's arguments mean where several of them, old and new names, say one thing."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from ...errors import UnsuitableModelError
from ..exchange.collectives import resolve_group
from ..reducer.buckets import DEFAULT_BUCKET_CAP_BYTES

_MIB = 1024 * 1024


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
    """Whether buffers are synchronised before forwards, and whether at construction."""
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
