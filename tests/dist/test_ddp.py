"""DistributedDataParallel on several ranks: what it exchanges, and when."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from photinus.parallel import DistributedDataParallel
from tests.dist.ddp_checks import (
    KIB_IN_MIB,
    SharedFrozenMixed,
    assert_equal_on_all_ranks,
    assert_same_gradients,
    batch,
    ddp_and_twin,
    expect,
    launches,
    naive_twin,
    run_each_check,
    small_ddp,
    small_net,
)
from tests.dist.naive import average_gradients, broadcast_model

# ---- gradients


def check_gradients_are_those_of_the_naive_all_reduce(group: dist.ProcessGroup) -> None:
    model = small_net(seed=group.rank())  # other weights on each rank: construction has to make them equal
    ddp, twin = ddp_and_twin(model, group, bucket_cap_mb=KIB_IN_MIB)
    assert len(ddp.reducer.plans) > 3
    for step in range(3):
        for net in (ddp, twin):
            net.zero_grad()
            net(batch(group, step)).square().mean().backward()
        average_gradients(twin, group)
        assert_same_gradients(model, twin, group)


def check_bits_do_not_depend_on_the_bucket_layout(group: dist.ProcessGroup) -> None:
    if dist.get_backend(group) != "photinus" and group.size() > 2:
        return
    gradients = []
    for cap_mb in (KIB_IN_MIB, 3 * KIB_IN_MIB, 25):
        ddp = DistributedDataParallel(small_net(), process_group=group, bucket_cap_mb=cap_mb)
        ddp(batch(group)).square().mean().backward()
        gradients.append([p.grad.clone() for p in ddp.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


def check_gradients_are_views_of_their_buckets_however_they_are_zeroed(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp, twin = ddp_and_twin(model, group)
    bucket = ddp.reducer.buckets[0].flat
    memory = range(bucket.data_ptr(), bucket.data_ptr() + bucket.numel() * bucket.element_size())
    for step, set_to_none in enumerate((True, False, False, True, True)):
        for net in (ddp, twin):
            net.zero_grad(set_to_none=set_to_none)
            net(batch(group, step)).square().mean().backward()
        average_gradients(twin, group)
        assert all(p.grad.data_ptr() in memory for p in model.parameters())
        assert_same_gradients(model, twin, group)
        for p in model.parameters():
            p.grad.detach_()  # what older training loops do; a view would refuse it


def check_exchange_starts_before_backward_ends_in_the_first_iteration(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    with launches() as started:
        before_last: list[int] = []
        first_layer = ddp.module[0].weight  # its gradient is the last
        first_layer.register_hook(lambda gradient: before_last.append(len(started)))
        ddp(batch(group)).square().mean().backward()
    assert before_last == [len(ddp.reducer.plans) - 1]
    assert len(started) == len(ddp.reducer.plans)


def check_no_sync_accumulates_and_the_next_backward_averages_the_sum(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp, twin = ddp_and_twin(model, group, bucket_cap_mb=KIB_IN_MIB)
    for _ in range(2):
        ddp.zero_grad()
        twin.zero_grad()
        with launches() as started, ddp.no_sync():
            for step in range(2):
                ddp(batch(group, step)).square().mean().backward()
        assert started == []
        ddp(batch(group, 2)).square().mean().backward()
        for step in range(3):
            twin(batch(group, step)).square().mean().backward()
        average_gradients(twin, group)
        assert_same_gradients(model, twin, group)


def check_no_sync_is_left_by_exceptions_too_and_nests(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(small_net(), process_group=group)
    with expect(ZeroDivisionError):
        with ddp.no_sync():
            raise ZeroDivisionError
    assert ddp.require_backward_grad_sync
    with ddp.no_sync():
        with ddp.no_sync():
            pass
        assert not ddp.require_backward_grad_sync
        ddp(batch(group)).sum().backward()
    with launches() as started:
        ddp(batch(group)).sum().backward()
    assert started


def check_gradient_accumulation_without_no_sync_is_right_too(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp, twin = ddp_and_twin(model, group)
    for step in range(3):
        ddp(batch(group, step)).square().mean().backward()
        twin(batch(group, step)).square().mean().backward()
    average_gradients(twin, group)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


def check_several_forwards_before_one_backward(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    broadcast_model(model, group)
    twin = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, process_group=group)
    for net in (ddp, twin):
        (net(batch(group, 0)).square().mean() + net(batch(group, 1)).square().mean()).backward()
    average_gradients(twin, group)
    assert_same_gradients(model, twin, group)


def check_a_second_backward_over_a_retained_graph(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp, twin = ddp_and_twin(model, group)
    loss = ddp(batch(group)).square().mean()
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    (4 * twin(batch(group)).square().mean()).backward()
    average_gradients(twin, group)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


def check_shared_frozen_and_mixed_parameters(group: dist.ProcessGroup) -> None:
    model = SharedFrozenMixed()
    ddp, twin = ddp_and_twin(model, group, bucket_cap_mb=KIB_IN_MIB)
    assert {plan.dtype for plan in ddp.reducer.plans} == {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.complex64,
    }
    for step in range(2):
        for net in (ddp, twin):
            net.zero_grad()
            net(batch(group, step)).backward()
        average_gradients(twin, group)
        assert_same_gradients(model, twin, group)
    assert model.convolution.weight.grad.stride() == model.convolution.weight.stride()
    assert model.frozen.weight.grad is None


def check_large_gradients_in_half_precision_are_averaged_without_overflow(group: dist.ProcessGroup) -> None:
    model = nn.Linear(1, 1, bias=False).half()
    ddp = DistributedDataParallel(model, process_group=group)
    ddp(torch.full((1, 1), 60000.0).half()).sum().backward()
    torch.testing.assert_close(model.weight.grad.float(), torch.full((1, 1), 60000.0), rtol=2e-3, atol=0.0)


def check_sparse_gradients_are_averaged(group: dist.ProcessGroup) -> None:
    torch.manual_seed(7)
    model = nn.ModuleDict({"rows": nn.Embedding(20, 4, sparse=True), "out": nn.Linear(4, 2)})
    twin = naive_twin(model, group)

    def loss(net: nn.Module, indices: torch.Tensor) -> torch.Tensor:
        return net["out"](net["rows"](indices)).square().mean()

    class Called(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return loss(self.inner, indices)

    ddp = DistributedDataParallel(Called(model), process_group=group)
    indices = torch.arange(2 * group.rank(), 3 * group.rank() + 3) % 20  # another number of rows on each rank
    for _ in range(2):
        ddp.zero_grad()
        twin.zero_grad()
        ddp(indices).backward()
        loss(twin, indices).backward()
        average_gradients(twin, group)
        assert model["rows"].weight.grad.is_sparse
        torch.testing.assert_close(model["rows"].weight.grad.to_dense(), twin["rows"].weight.grad)
        torch.testing.assert_close(model["out"].weight.grad, twin["out"].weight.grad)
        assert_equal_on_all_ranks(model["rows"].weight.grad.to_dense(), group)


def check_a_sparse_weight_tied_to_a_dense_layer(group: dist.ProcessGroup) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(8)
            self.rows = nn.Embedding(9, 4, sparse=True)
            self.out = nn.Linear(4, 9, bias=False)
            self.out.weight = self.rows.weight

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return self.out(self.rows(indices)).square().mean()

    model = Tied()
    ddp, twin = ddp_and_twin(model, group)
    for net in (ddp, twin):
        net(torch.tensor([group.rank(), 3])).backward()
    average_gradients(twin, group)
    torch.testing.assert_close(model.rows.weight.grad, twin.rows.weight.grad)


def check_backward_through_averaged_gradients(group: dist.ProcessGroup) -> None:
    """A penalty on the averaged gradient, differentiated: equal to one process that has all batches."""
    model = small_net()
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=KIB_IN_MIB)
    ddp(batch(group)).square().mean().backward(create_graph=True)
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    scale = 1.0 + group.rank()  # the ranks may do different things with the gradients
    (scale * sum(g.square().sum() for g in gradients)).backward()

    losses = []
    for rank in range(group.size()):
        generator = torch.Generator().manual_seed(1000 * rank)
        losses.append(alone(torch.randn(5, 6, generator=generator)).square().mean())
    whole = torch.autograd.grad(sum(losses) / len(losses), list(alone.parameters()), create_graph=True)
    mean_scale = sum(1.0 + rank for rank in range(group.size())) / group.size()
    (mean_scale * sum(g.square().sum() for g in whole)).backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def check_a_graph_made_in_no_sync_is_left_alone_by_the_next_exchange(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp, twin = ddp_and_twin(model, group)
    with ddp.no_sync():
        ddp(batch(group, 0)).square().mean().backward(create_graph=True)
    assert all(p.grad.requires_grad for p in model.parameters())
    for net in (ddp, twin):
        net.zero_grad()
        net(batch(group, 1)).square().mean().backward()
    average_gradients(twin, group)
    assert not any(p.grad.requires_grad for p in model.parameters())
    assert_same_gradients(model, twin, group)


def check_gradient_penalty_on_the_inputs(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp, twin = ddp_and_twin(model, group)
    for net in (ddp, twin):
        x = batch(group).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).square().mean(), x, create_graph=True)
        (slope.square().sum() + net(x).square().mean()).backward()
    average_gradients(twin, group)
    assert_same_gradients(model, twin, group)


class Checkpointed(nn.Module):
    """Every layer recomputed in backward; the reentrant kind runs a backward inside the backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.use_reentrant = use_reentrant
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.out = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=self.use_reentrant)
        return self.out(x)


def check_activation_checkpointing_of_both_kinds(group: dist.ProcessGroup) -> None:
    for reentrant in (False, True):
        for out_in_checkpoint in (False, True):
            model = Checkpointed(reentrant)
            if out_in_checkpoint:
                model.out.requires_grad_(False)  # then all gradients come from nested backwards
            ddp, twin = ddp_and_twin(model, group, bucket_cap_mb=KIB_IN_MIB / 16)
            for step in range(2):
                for net in (ddp, twin):
                    net.zero_grad()
                    net(batch(group, step)).square().mean().backward()
                average_gradients(twin, group)
                assert_same_gradients(model, twin, group)


def check_activation_checkpointing_of_the_wrapped_model_itself(group: dist.ProcessGroup) -> None:
    """The forward that is repeated inside backward exchanges nothing and does not end the round that is open."""
    for reentrant in (False, True):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        model.scale = nn.Parameter(torch.ones(2))  # used after the forward, so its gradient is the first
        ddp, twin = ddp_and_twin(model, group, bucket_cap_mb=KIB_IN_MIB / 16)
        for step in range(2):
            for net in (ddp, twin):
                net.zero_grad()
                x = batch(group, step).requires_grad_()
                scale = next(p for name, p in net.named_parameters() if name.endswith("scale"))
                (checkpoint(net, x, use_reentrant=reentrant) * scale).square().mean().backward()
            average_gradients(twin, group)
            assert_same_gradients(model, twin, group)


def check_a_group_of_some_ranks(group: dist.ProcessGroup) -> None:
    ranks = list(range(1, group.size())) if group.size() > 2 else list(range(group.size()))
    part = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        with expect(ValueError, "not a member"):
            DistributedDataParallel(small_net(), process_group=part)
        return
    model = small_net(seed=dist.get_rank())
    twin = naive_twin(model, part)
    ddp = DistributedDataParallel(model, process_group=part)
    for net in (ddp, twin):
        net(batch(group)).sum().backward()
    average_gradients(twin, part)
    assert_same_gradients(model, twin, part)


def check_training_on_forward_derivatives_goes_on_when_buckets_are_cut_anew(group: dist.ProcessGroup) -> None:
    ddp, twin = ddp_and_twin(small_net(), group, bucket_cap_mb=KIB_IN_MIB)
    for step in range(3):
        for net in (ddp, twin):
            net.zero_grad()
            x = batch(group, step)
            y, slope = torch.func.jvp(net, (x,), (torch.ones_like(x),))
            (y.square().mean() + slope.square().mean()).backward()
        average_gradients(twin, group)
        assert_same_gradients(ddp.module, twin, group)


def check_a_forward_in_inference_mode_may_come_first(group: dist.ProcessGroup) -> None:
    ddp, twin = ddp_and_twin(nn.Sequential(small_net(), nn.BatchNorm1d(3).eval()), group)
    for step in range(2):
        for net in (ddp, twin):
            with torch.inference_mode():
                net(batch(group, step))
            net.zero_grad()
            net(batch(group, step)).square().mean().backward()
        average_gradients(twin, group)
        assert_same_gradients(ddp.module, twin, group)


test_ddp = run_each_check(__name__)
