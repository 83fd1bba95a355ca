"""Strategy "ddp": every rank holds the whole model; Photinus' own DistributedDataParallel averages the gradients."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..ddp.ddp import DistributedDataParallel
from .strategy import Strategy


def options_of(wrapper: type[nn.Module]) -> frozenset[str]:
    """Names of a wrapper's arguments that are for users to choose."""
    return frozenset(inspect.signature(wrapper).parameters) - {"module", "device_ids", "output_device"}


class DDPStrategy(Strategy):
    """Whole model on every rank, gradients averaged during backward. Options: those of DistributedDataParallel."""

    name: ClassVar[str] = "ddp"
    accepted: ClassVar[frozenset[str]] = options_of(DistributedDataParallel)
    replicates: ClassVar[bool] = True

    def wrap(self, model: nn.Module, device: torch.device, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Wraps in `photinus.DistributedDataParallel`; optimizers stay as they are."""
        device_ids = None if device.type == "cpu" else [device]
        return DistributedDataParallel(model, device_ids=device_ids, **self.options)

    @classmethod
    def recognizes(cls, part: nn.Module | Optimizer) -> bool:
        """Whether it is a `photinus.DistributedDataParallel`."""
        return issubclass(type(part), DistributedDataParallel)
