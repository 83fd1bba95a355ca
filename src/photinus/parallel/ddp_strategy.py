"""Strategy "ddp": every rank holds the whole model; Photinus' own DistributedDataParallel averages the gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import nn

from .ddp import DistributedDataParallel
from .strategy import Strategy

__all__ = ["DDPStrategy"]


class DDPStrategy(Strategy):
    """Whole model on every rank, gradients averaged during backward. Options: those of DistributedDataParallel."""

    name: ClassVar[str] = "ddp"

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Wraps in `photinus.DistributedDataParallel`."""
        device_ids = None if device.type == "cpu" else [device]
        return DistributedDataParallel(model, device_ids=device_ids, **self.options)

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """The model inside."""
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """See `DistributedDataParallel.no_sync`."""
        if type(wrapped) is not DistributedDataParallel:
            raise TypeError(f"strategy {self.name!r} did not wrap this {type(wrapped).__name__}")
        return wrapped.no_sync()
