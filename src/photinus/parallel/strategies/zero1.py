"""Strategy "zero1": as "ddp", and the optimizer's state is split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..zero.sharded_optimizer import check_shardable, consolidated_state, is_sharded, shard_optimizer
from ..zero.swap_parameters import check_repointable
from .ddp import DDPStrategy


class Zero1Strategy(DDPStrategy):
    """Whole model and gradients on every rank; each rank remembers and steps its part, and parts are broadcast.

    Each rank holds 1/world size of what the optimizer remembers (Adam: twice the parameters). Options: those of
    DistributedDataParallel.
    """

    name: ClassVar[str] = "zero1"

    def check(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Wants the optimizer, and one that can be split."""
        if not optimizers:
            raise ValueError(
                "strategy 'zero1' splits what the optimizer remembers, so wrap needs it: "
                'wrap(model, optimizer, strategy="zero1")'
            )
        check_repointable(optimizers, self.name)
        check_shardable(optimizers)

    def wrap(self, model: nn.Module, device: torch.device, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Wraps in `photinus.DistributedDataParallel`, and splits the optimizers in place."""
        wrapped = super().wrap(model, device)
        for optimizer in optimizers:
            shard_optimizer(optimizer, self.group)
        return wrapped

    def save(self, part: nn.Module | Optimizer) -> dict[str, Any]:
        """See `Strategy.save`."""
        return super().save(part) if isinstance(part, nn.Module) else consolidated_state(part)

    def splits(self, part: nn.Module | Optimizer) -> bool:
        """Optimizers are split."""
        return isinstance(part, Optimizer) and is_sharded(part)

    @classmethod
    def recognizes(cls, part: nn.Module | Optimizer) -> bool:
        """Whether it is a split optimizer, or a model as "ddp" wraps it."""
        return super().recognizes(part) or is_sharded(part)
