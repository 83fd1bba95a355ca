"""Uneven inputs: ranks that run out of batches do not stop the others."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from photinus.errors import UnsuitableModelError
from photinus.parallel import DistributedDataParallel, SyncBatchNorm
from tests.dist.ddp_checks import (
    assert_equal_on_all_ranks,
    expect,
    run_each_check,
    small_ddp,
    small_net,
)


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def steps_of(rank: int) -> int:
    return 2 + 2 * rank


def one_process(model: nn.Module, world_size: int, *, by_present: bool) -> nn.Module:
    """What the ranks do together, done alone: the mean over all ranks, or over those that still have batches."""
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(steps_of(world_size - 1)):
        optimizer.zero_grad()
        present = [rank for rank in range(world_size) if step < steps_of(rank)]
        for rank in present:
            (alone(batch_of(rank, step)).square().mean() / (len(present) if by_present else world_size)).backward()
        optimizer.step()
    return alone


def check_ranks_without_batches_count_as_zero_or_not_at_all(group: dist.ProcessGroup) -> None:
    for by_present in (False, True):
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"nan_guard": True}):
            ddp = small_ddp(group, **options)
            expected = one_process(ddp.module, group.size(), by_present=by_present)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            with ddp.join(divide_by_initial_world_size=not by_present):
                for step in range(steps_of(group.rank())):
                    optimizer.zero_grad()
                    ddp(batch_of(group.rank(), step)).square().mean().backward()
                    optimizer.step()
            for p, q in zip(ddp.module.parameters(), expected.parameters(), strict=True):
                assert_equal_on_all_ranks(p, group)
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def check_a_rank_without_any_batch(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    before = copy.deepcopy(ddp.module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(3 if group.rank() else 0):
            optimizer.zero_grad()
            ddp(batch_of(group.rank(), step)).square().mean().backward()
            optimizer.step()
    for p, q in zip(ddp.module.parameters(), before.parameters(), strict=True):
        assert_equal_on_all_ranks(p, group)
        assert not torch.equal(p, q)


def check_buffers_and_no_sync_inside_join(group: dist.ProcessGroup) -> None:
    for order in (group.rank(), group.size() - 1 - group.rank()):  # rank 0 runs out first, then the last rank does
        model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
        ddp = DistributedDataParallel(model, process_group=group)
        with ddp.join():
            for step in range(2 * steps_of(order)):
                if step % 2 == 0:
                    with ddp.no_sync():
                        ddp(batch_of(order, step)).sum().backward()
                else:
                    ddp(batch_of(order, step)).sum().backward()
        for tensor in [*model.parameters(), *model.buffers()]:
            assert_equal_on_all_ranks(tensor, group)
        assert model[0].num_batches_tracked == 2 * steps_of(group.size() - 1)


def check_zero_redundancy_optimizer_in_the_same_join(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    expected = one_process(ddp.module, group.size(), by_present=False)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    with Join([ddp, optimizer]):
        for step in range(steps_of(group.rank())):
            optimizer.zero_grad()
            ddp(batch_of(group.rank(), step)).square().mean().backward()
            optimizer.step()
    for p, q in zip(ddp.module.parameters(), expected.parameters(), strict=True):
        assert_equal_on_all_ranks(p, group)
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def check_early_termination_is_an_error_on_every_rank(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(small_net(), process_group=group)
    with expect(RuntimeError, "exhausted"):
        with ddp.join(throw_on_early_termination=True):
            for step in range(1 if group.rank() == 0 else 4):
                ddp(batch_of(group.rank(), step)).sum().backward()


def check_sync_batch_norm_without_batches_is_an_error_on_every_rank(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(SyncBatchNorm(6, process_group=group), nn.Linear(6, 2))
    ddp = DistributedDataParallel(model, process_group=group)
    with expect(UnsuitableModelError, "layer 0 is a SyncBatchNorm", f"only {group.size() - 1} of {group.size()} ranks"):
        with ddp.join():
            for step in range(1 if group.rank() == 0 else 4):
                ddp(batch_of(group.rank(), step)).sum().backward()
    ddp.eval()  # statistics that are not of the batch need nobody
    with ddp.join():
        for step in range(1 if group.rank() == 0 else 2):
            ddp(batch_of(group.rank(), step)).sum().backward()


def check_a_forward_after_join_needs_no_other_rank(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(small_net(), process_group=group)
    with ddp.join():
        ddp(batch_of(group.rank(), 0)).sum().backward()
    if group.rank() == 0:
        with ddp.no_sync():
            ddp(batch_of(0, 1)).sum().backward()


def check_join_disabled_exchanges_nothing_more(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(small_net(), process_group=group)
    with ddp.join(enable=False):
        for step in range(2):
            ddp(batch_of(group.rank(), step)).sum().backward()
    assert_equal_on_all_ranks(ddp.module[0].weight.grad, group)


test_ddp_join = run_each_check(__name__)
