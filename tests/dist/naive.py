"""The obvious data parallelism: after backward, one all-reduce per parameter.

No buckets, no hooks, no overlap. It is what `DistributedDataParallel` is tested against, and readable in one breath.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from photinus.parallel.exchange.collectives import GroupAverage, resolve_group


@torch.no_grad()
def broadcast_model(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Sets parameters and buffers of every rank to those of the group's rank 0, one broadcast each."""
    group = resolve_group(process_group)
    for tensor in [*module.parameters(), *module.buffers()]:
        value = tensor.detach().contiguous()
        dist.broadcast(value, group=group, group_src=0)
        tensor.copy_(value)


@torch.no_grad()
def average_gradients(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Replaces each gradient by its average over the ranks; to be called after backward, on every rank.

    A parameter without gradient counts as zero where another rank has one; it stays without where none has.
    """
    group = resolve_group(process_group)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        has_gradient = torch.tensor([parameter.grad is not None], dtype=torch.uint8, device=parameter.device)
        dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
        if not has_gradient.item():
            continue
        if parameter.grad is None:
            gradient = torch.zeros_like(parameter)
        else:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        gradient = gradient.contiguous().clone()
        GroupAverage(group, parameter.device)(gradient)
        parameter.grad = gradient
