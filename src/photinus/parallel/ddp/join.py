"""Uneven inputs: ranks that have run out of batches take part in the others' exchanges with zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ...errors import UnsuitableModelError
from .sync_batch_norm import SyncBatchNorm
from .wrapper import Wrapper


class UnevenInputs(Joinable):
    """What `torch.distributed.algorithms.join` asks of a model, and `join`. A base of DistributedDataParallel."""

    if TYPE_CHECKING:
        device: torch.device
        process_group: dist.ProcessGroup

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for loops that have other numbers of batches on each rank: the others' go on with zeros.

        At its end every rank has the model of the last one to finish. Momentum and the like are not carried over: to
        train on after it, use an optimizer without, or ZeroRedundancyOptimizer, in `Join([model, optimizer])`.

        Args:
            divide_by_initial_world_size: averages are over all ranks; False: over those that still have batches.
            enable: False does nothing, at no cost.
            throw_on_early_termination: raise RuntimeError on every rank as soon as one runs out of batches.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """What `torch.distributed.algorithms.join.Join` calls on ranks without input."""
        divide = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(cast("Wrapper", self), divide_by_initial_world_size=divide)

    @property
    def join_device(self) -> torch.device:
        """Where the messages of `Join` lie."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which `Join` sends them."""
        return self.process_group


class DDPJoinHook(JoinHook):
    """What a rank without input does while others go on, and when all are done. See `torch.distributed…join.Join`."""

    def __init__(self, ddp: Wrapper, *, divide_by_initial_world_size: bool) -> None:
        self._ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        self._own_gradients: list[torch.Tensor | None] | None = None
        super().__init__()

    def main_hook(self) -> None:
        """Shadows one forward and backward of the others, in the order in which they exchange."""
        ddp = self._ddp
        syncs, contributors = tell_ranks(ddp, joined=True)
        ddp.require_forward_param_sync = syncs
        if not syncs:
            return
        if not ddp._divide_by_initial_world_size:
            ddp.reducer.average.contributors = contributors
        if self._own_gradients is None:
            self._own_gradients = [slot.parameter.grad for slot in ddp.reducer.slots]
        ddp.reducer.rebuild_buckets()
        ddp._sync_buffers(joined=True)
        ddp.reducer.shadow_round()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Sets the model of all ranks to that of the last one to finish; gradients become this rank's own again."""
        ddp = self._ddp
        if self._own_gradients is not None:
            for slot, gradient in zip(ddp.reducer.slots, self._own_gradients, strict=True):
                slot.parameter.grad = gradient
            self._own_gradients = None
        ddp.reducer.average.contributors = ddp.reducer.world_size
        ddp._authoritative_rank = common_rank(ddp, candidate=is_last_joiner)
        ddp._sync_module_states(ddp._authoritative_rank, buffers=ddp.forward_sync_buffers)
        ddp.reducer.facts.restart()
        ddp._join_config = ddp._join_config._replace(enable=False)  # torch leaves it on: later forwards would exchange


def tell_ranks(ddp: Wrapper, *, joined: bool) -> tuple[bool, int]:
    """Tells the other ranks what this one does in this iteration; every rank calls it once in each.

    Returns:
        Whether the backward is followed by an exchange, and how many ranks have input.

    Raises:
        UnsuitableModelError: on every rank, when one has no input and SyncBatchNorm layers need it.
    """
    syncs = not joined and ddp.syncs
    told = torch.tensor([float(syncs), float(not joined)], device=ddp.device)
    dist.all_reduce(told, group=ddp.process_group)
    someone_syncs, present = told.tolist()
    if present < ddp.process_group.size():
        for name, layer in ddp.module.named_modules():
            if isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm)) and layer.training:
                raise UnsuitableModelError(
                    f"layer {name} is a SyncBatchNorm, which exchanges inside the forward, and only {int(present)} of "
                    f"{ddp.process_group.size()} ranks have input left: join cannot take part in that. Give all ranks "
                    f"the same number of batches, or use join(throw_on_early_termination=True)."
                )
    return someone_syncs > 0, int(present)


def common_rank(ddp: Wrapper, *, candidate: bool) -> int:
    """The highest rank that is a candidate; every rank calls it.

    Raises:
        ValueError: there is none.
    """
    rank = torch.tensor([ddp.process_group.rank() if candidate else -1], device=ddp.device)
    dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=ddp.process_group)
    found = int(rank.item())
    if found < 0:
        raise ValueError("no rank of the group has a model to offer; this is a defect of Photinus, please report it")
    return found
