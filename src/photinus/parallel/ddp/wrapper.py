"""What the parts of DistributedDataParallel read and set of the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from ..reducer.reducer import Reducer


class Wrapper(Protocol):
    """A DistributedDataParallel as its parts see it; they do not import the class, which imports them."""

    module: nn.Module
    reducer: Reducer
    process_group: dist.ProcessGroup
    device: torch.device
    device_ids: list[torch.device] | None
    output_device: torch.device | None
    bucket_bytes_cap: int
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _authoritative_rank: int
    _divide_by_initial_world_size: bool
    _join_config: Any

    @property
    def syncs(self) -> bool:
        """Whether the backward of a forward now would be exchanged."""

    def _sync_buffers(self, *, joined: bool = False) -> None: ...

    def _sync_module_states(self, source: int, *, buffers: bool) -> None: ...
