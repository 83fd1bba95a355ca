"""Unused parameters, and what DistributedDataParallel says when something is wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from photinus.errors import MissingGradientError
from photinus.parallel import DistributedDataParallel
from tests.dist.ddp_checks import (
    KIB_IN_MIB,
    TwoHeads,
    assert_equal_on_all_ranks,
    assert_same_gradients,
    batch,
    ddp_and_twin,
    expect,
    run_each_check,
    small_ddp,
    small_net,
)
from tests.dist.naive import average_gradients

# ---- unused parameters and errors


class SharedCheckpoints(nn.Module):
    """Its first and its last reentrant checkpoint share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.between = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in (self.shared, self.between, self.shared):
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def check_a_layer_of_several_reentrant_checkpoints_is_named_and_no_other(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(SharedCheckpoints(), process_group=group)
    ddp(batch(group)).sum().backward()
    with expect(RuntimeError, "parameter shared.", "several reentrant checkpoints"):
        ddp(batch(group))
    ddp = DistributedDataParallel(SharedCheckpoints(), process_group=group, static_graph=True)
    for _ in range(3):
        ddp(batch(group)).sum().backward()


class SharedAboveAnother(nn.Module):
    """Two reentrant checkpoints share a layer, whose bucket waits for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.shared = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


def check_a_second_gradient_is_averaged_while_its_bucket_waits(group: dist.ProcessGroup) -> None:
    model = SharedAboveAnother()
    ddp, twin = ddp_and_twin(model, group)
    for step in range(3):
        for net in (ddp, twin):
            net.zero_grad()
            net(batch(group, step)).square().mean().backward()
        average_gradients(twin, group)
        assert_same_gradients(model, twin, group)


def check_a_parameter_without_gradient_is_named_on_every_rank(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(TwoHeads(), process_group=group, bucket_cap_mb=KIB_IN_MIB / 8)
    for _ in range(2):  # the error leaves nothing behind
        with expect(MissingGradientError, "heads.2.weight [2, 20]", "heads.1.bias", "4 of 8", "find_unused_parameters"):
            ddp(batch(group), 0)["out"][0].sum().backward()


def check_a_parameter_without_gradient_on_one_rank_is_an_error_there(
    group: dist.ProcessGroup,
) -> None:
    model = TwoHeads()
    del model.heads[2]
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=KIB_IN_MIB / 8)

    def loss(heads: list[int]) -> torch.Tensor:
        return sum(ddp(batch(group), head)["out"][0].sum() for head in heads)

    if group.rank() == 1:
        with expect(MissingGradientError, "rank 1: 2 of 6", "heads.1.weight", "heads.1.bias"):
            loss([0]).backward()
    else:
        loss([0, 1]).backward()
    ddp.zero_grad()
    loss([0, 1]).backward()
    assert_equal_on_all_ranks(model.heads[1].weight.grad, group)


def check_an_exception_in_backward_leaves_the_reducer_usable(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp, twin = ddp_and_twin(model, group, bucket_cap_mb=KIB_IN_MIB)

    def explode(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("in the user's hook")

    for _ in range(2):
        hook = ddp.module[2].weight.register_hook(explode)
        with expect(ZeroDivisionError, "in the user's hook"):
            ddp(batch(group)).square().mean().backward()
        hook.remove()
        ddp.zero_grad()
        twin.zero_grad()
        for net in (ddp, twin):
            net(batch(group, 1)).square().mean().backward()
        average_gradients(twin, group)
        assert_same_gradients(model, twin, group)


def check_after_an_exception_on_one_rank_all_can_go_on(group: dist.ProcessGroup) -> None:
    def explode(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("on rank 0 only")

    for options in ({}, {"find_unused_parameters": True}):
        ddp = small_ddp(group, **options)
        if group.rank() == 0:
            hook = ddp.module[2].weight.register_hook(explode)
            with expect(ZeroDivisionError):
                ddp(batch(group)).sum().backward()
            hook.remove()
        else:
            ddp(batch(group)).sum().backward()
        ddp.zero_grad()
        ddp(batch(group)).sum().backward()
        assert_equal_on_all_ranks(ddp.module[0].weight.grad, group)


def check_find_unused_parameters_averages_what_some_rank_used(group: dist.ProcessGroup) -> None:
    model = TwoHeads()
    ddp, twin = ddp_and_twin(model, group, find_unused_parameters=True, bucket_cap_mb=KIB_IN_MIB / 8)
    for step in range(4):
        head = (group.rank() + step) % 2 if step < 3 else 0
        for net in (ddp, twin):
            net.zero_grad()
            net(batch(group, step), head)["out"][0].square().mean().backward()
        average_gradients(twin, group)
        assert model.heads[2].weight.grad is None
        assert (model.heads[1].weight.grad is None) == (step == 3)
        assert_same_gradients(model, twin, group)


def check_find_unused_parameters_with_no_sync(group: dist.ProcessGroup) -> None:
    """A head used only inside no_sync has a gradient that the next exchange averages."""
    model = TwoHeads()
    ddp, twin = ddp_and_twin(model, group, find_unused_parameters=True)
    with ddp.no_sync():
        ddp(batch(group), group.rank() % 2)["out"][0].sum().backward()
    ddp(batch(group), 0)["out"][0].sum().backward()
    twin(batch(group), group.rank() % 2)["out"][0].sum().backward()
    twin(batch(group), 0)["out"][0].sum().backward()
    average_gradients(twin, group)
    assert_same_gradients(model, twin, group)


def check_a_rank_whose_loss_reaches_no_parameter_takes_part_with_zeros(group: dist.ProcessGroup) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.layer = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            return self.layer(x) if use else x[:, :2]

    model = Gate()
    ddp, twin = ddp_and_twin(model, group, find_unused_parameters=True)
    for net in (ddp, twin):
        x = batch(group).requires_grad_()
        net(x, group.rank() == 0).sum().backward()
    average_gradients(twin, group)
    assert_same_gradients(model, twin, group)


def check_find_unused_parameters_over_several_forwards(group: dist.ProcessGroup) -> None:
    model = TwoHeads()
    ddp, twin = ddp_and_twin(model, group, find_unused_parameters=True, bucket_cap_mb=KIB_IN_MIB / 8)
    for net in (ddp, twin):
        sum(net(batch(group, head), head)["out"][0].square().mean() for head in (0, 1)).backward()
    average_gradients(twin, group)
    assert_same_gradients(model, twin, group)


def check_an_output_left_out_of_the_loss_counts_as_zero_when_unused_is_allowed(group: dist.ProcessGroup) -> None:
    class Both(TwoHeads):
        def forward(self, x: torch.Tensor, head: int) -> Any:
            hidden = torch.tanh(self.trunk(x))
            return self.heads[0](hidden), self.heads[1](hidden)

    model = Both()
    ddp, twin = ddp_and_twin(model, group, find_unused_parameters=True)
    for net in (ddp, twin):
        net(batch(group), 0)[group.rank() % 2].square().sum().backward()
    average_gradients(twin, group)
    assert_same_gradients(model, twin, group)


def check_a_gradient_that_comes_after_its_bucket_left_is_an_error(group: dist.ProcessGroup) -> None:
    """Unused by the forward, so sent as zeros at once; then used outside of it."""
    model = TwoHeads()
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True, bucket_cap_mb=KIB_IN_MIB / 8)
    output = ddp(batch(group), 0)["out"][0]
    with expect(RuntimeError, "heads.2.weight", "outside of the wrapped forward"):
        (output.sum() + (output.mean() * model.heads[2].weight).sum() * 0 + model.trunk.weight.sum()).backward()
    ddp.zero_grad()
    ddp(batch(group), 0)["out"][0].sum().backward()
    assert_equal_on_all_ranks(model.trunk.weight.grad, group)


def check_unfreezing_after_wrapping_is_refused(group: dist.ProcessGroup) -> None:
    model = small_net()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model, process_group=group)
    model[0].requires_grad_(True)
    with expect(ValueError, "0.weight", "Wrap the model again"):
        ddp(batch(group))


def check_freezing_after_wrapping_is_named_in_the_error(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp = DistributedDataParallel(model, process_group=group)
    model[0].bias.requires_grad_(False)
    with expect(MissingGradientError, "0.bias [40] (frozen since)"):
        ddp(batch(group)).sum().backward()


test_ddp_errors = run_each_check(__name__)
