"""Strategy "torch-ddp": torch's own DistributedDataParallel, the oracle that ours is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from .ddp import options_of
from .strategy import Strategy


class TorchDDPStrategy(Strategy):
    """torch.nn.parallel.DistributedDataParallel. Options: those of that class."""

    name: ClassVar[str] = "torch-ddp"
    accepted: ClassVar[frozenset[str]] = options_of(nn.parallel.DistributedDataParallel)
    replicates: ClassVar[bool] = True

    def wrap(self, model: nn.Module, device: torch.device, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Wraps in torch's class; optimizers stay as they are."""
        _ = self.group  # where there is none, the error says what to do, as torch's would not
        device_ids = None if device.type == "cpu" else [device]
        return nn.parallel.DistributedDataParallel(model, device_ids=device_ids, **self.options)

    @classmethod
    def recognizes(cls, part: nn.Module | Optimizer) -> bool:
        """Whether it is torch's class itself. (Ours says that it is an instance too, for libraries that ask.)"""
        return nn.parallel.DistributedDataParallel in type(part).__mro__
