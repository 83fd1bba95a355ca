"""Strategy "torch-ddp": torch's own DistributedDataParallel, the oracle that ours is compared with."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar, cast

import torch
from torch import nn

from .exchange import resolve_group
from .strategy import Strategy

__all__ = ["TorchDDPStrategy"]


class TorchDDPStrategy(Strategy):
    """torch.nn.parallel.DistributedDataParallel. Options: those of that class."""

    name: ClassVar[str] = "torch-ddp"

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Wraps in torch's class."""
        resolve_group(self.options.get("process_group"))
        device_ids = None if device.type == "cpu" else [device]
        return nn.parallel.DistributedDataParallel(model, device_ids=device_ids, **self.options)

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """The model inside."""
        return wrapped.module if isinstance(wrapped, nn.parallel.DistributedDataParallel) else wrapped

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """See `torch.nn.parallel.DistributedDataParallel.no_sync`."""
        if not isinstance(wrapped, nn.parallel.DistributedDataParallel):
            raise TypeError(f"strategy {self.name!r} did not wrap this {type(wrapped).__name__}")
        return cast(AbstractContextManager[None], wrapped.no_sync())
