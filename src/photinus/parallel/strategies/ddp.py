"""Strategies "ddp", "torch-ddp", "zero1" (every rank holds the whole model) and "dp" (one process, several devices)."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..ddp.ddp import DistributedDataParallel
from ..exchange.agreement import place_in_group
from ..zero.sharded_optimizer import (
    check_repointable,
    check_shardable,
    consolidated_state,
    is_sharded,
    note_steps,
    shard_optimizer,
)
from ..zero.step_facts import StepFacts
from ..zero.units import refuse_renorm
from .strategy import Strategy, explain_errors


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
        return explain_errors(DistributedDataParallel(model, device_ids=device_ids, **self.options), self.group)

    @classmethod
    def recognizes(cls, part: nn.Module | Optimizer) -> bool:
        """Return whether it is a `photinus.DistributedDataParallel`."""
        return issubclass(type(part), DistributedDataParallel)


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
        """Return whether it is torch's class itself. (Ours says that it is an instance too, for libraries that ask.)"""
        return nn.parallel.DistributedDataParallel in type(part).__mro__


class Zero1Strategy(DDPStrategy):
    """Whole model and gradients on every rank; each rank remembers and steps its part, and parts are broadcast.

    Each rank holds 1/world size of what the optimizer remembers (Adam: twice the parameters). An optimizer whose `step`
    computes over all gradients (a norm to clip by) sees this rank's: clip before it. Options: those of "ddp".
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
        refuse_renorm(model, self.name)

    def wrap(self, model: nn.Module, device: torch.device, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Wraps in `photinus.DistributedDataParallel`, and splits the optimizers in place."""
        for parameter in model.parameters():
            if parameter.is_conj() or parameter.is_neg():  # lazily, so that a broadcast does not write into it
                parameter.data = parameter.data.resolve_conj().resolve_neg()
        wrapped = cast(DistributedDataParallel, super().wrap(model, device))
        for optimizer in optimizers:
            shard_optimizer(optimizer, self.group)
        if wrapped.check_ranks and self.group.size() > 1:
            reference = weakref.ref(wrapped)
            reads = partial(_unaveraged, reference), partial(_gradient_memory, reference)
            facts = StepFacts(wrapped._named_parameters(), self.group, *reads)
            note_steps(optimizers, facts)
            wrapped.compare_acts(facts)
        return wrapped

    def save(self, part: nn.Module | Optimizer) -> dict[str, Any]:
        """See `Strategy.save`."""
        return super().save(part) if isinstance(part, nn.Module) else consolidated_state(part)

    def local_state(self, part: nn.Module | Optimizer) -> dict[str, Any]:
        """See `Strategy.local_state`."""
        return super().local_state(part) if isinstance(part, nn.Module) else cast(Any, part).state_dict(part=True)

    def splits(self, part: nn.Module | Optimizer) -> bool:
        """Optimizers are split."""
        return isinstance(part, Optimizer) and is_sharded(part)

    @classmethod
    def recognizes(cls, part: nn.Module | Optimizer) -> bool:
        """Return whether it is a split optimizer, or a model as "ddp" wraps it."""
        return super().recognizes(part) or is_sharded(part)


def _unaveraged(reference: weakref.ref[Any], parameters: Sequence[torch.Tensor]) -> list[str]:
    """The names of those whose gradients come from a backward that no exchange has averaged."""
    wrapped = reference()
    slots = [] if wrapped is None else [slot for slot in wrapped.reducer.slots if slot.touched]
    own = {id(parameter) for parameter in parameters} if slots else set()
    return [slot.name for slot in slots if id(slot.parameter) in own and slot.parameter.grad is not None]


def _gradient_memory(reference: weakref.ref[Any]) -> list[torch.Tensor]:
    wrapped = reference()
    return [] if wrapped is None else [bucket.flat for bucket in wrapped.reducer.buckets]


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
        return not (hasattr(part, "no_sync") or hasattr(part, "set_requires_gradient_sync"))
