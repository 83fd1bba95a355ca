"""Strategy "dp": one process drives several devices with torch.nn.DataParallel; with one device, the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..exchange.agreement import place_in_group
from .strategy import Strategy


class DPStrategy(Strategy):
    """One process; each batch is cut over its devices, and the parts of the gradients are added on the first.

    On CPUs and on machines with one device the model stays as it is. Batch norms take the statistics of each device's
    part of a batch. Processes do not exchange anything, so there may be only one: "ddp" is for several.

    Options:
        device_ids: CUDA devices; default: all that this process sees. The first is the one where the model lies.
        output_device: where outputs are gathered; default: the first device.
        dim: the dimension along which inputs are cut; default 0.
    """

    name: ClassVar[str] = "dp"
    accepted: ClassVar[frozenset[str]] = frozenset({"device_ids", "output_device", "dim"})

    def check(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refuses several processes: they would train as many different models."""
        rank, world_size = place_in_group()
        if world_size > 1:
            raise ValueError(
                f"strategy 'dp' is one process that drives all devices, but there are {world_size} processes (this is "
                f"rank {rank}), which would train {world_size} different models. Start one process, or "
                f'take strategy="ddp".'
            )

    def wrap(self, model: nn.Module, device: torch.device, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Wraps in torch.nn.DataParallel where there are several devices; optimizers stay as they are."""
        device_ids = self.options.get("device_ids")
        if device.type != "cuda":
            if device_ids:
                raise ValueError(f"strategy 'dp': device_ids={list(device_ids)}, but the device is {device}")
            return model
        own = device.index or 0
        if device_ids is None:
            device_ids = [own, *(i for i in range(torch.cuda.device_count()) if i != own)]
        first = device_ids[0] if len(device_ids) else own
        if (first if isinstance(first, int) else torch.device(first).index or 0) != own:
            raise ValueError(
                f"strategy 'dp': device_ids={list(device_ids)}, but the model goes to {device}, which has to be the "
                f"first; leave device_ids out, or name another device to photinus.init"
            )
        if len(device_ids) < 2:
            return model
        return nn.DataParallel(model, **{**self.options, "device_ids": device_ids})

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """The model inside."""
        return cast(nn.Module, wrapped.module) if isinstance(wrapped, nn.DataParallel) else wrapped

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Changes nothing: one process has nobody to average with, and gradients add up by themselves."""
        self._require_made(wrapped)
        return nullcontext()

    @classmethod
    def recognizes(cls, part: nn.Module | Optimizer) -> bool:
        """Return whether it is a torch.nn.DataParallel or a plain module or optimizer, which know of no other ranks."""
        if isinstance(part, nn.Module):
            return not hasattr(part, "no_sync") and not hasattr(part, "set_requires_gradient_sync")
        return True
