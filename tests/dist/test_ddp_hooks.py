"""Communication hooks, torch's own among them, and optimizers that step inside backward."""

from __future__ import annotations

import copy
import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

from photinus.errors import NonFiniteGradientError, PhotinusError
from photinus.parallel import DistributedDataParallel
from tests.dist.ddp_checks import (
    KIB_IN_MIB,
    TwoHeads,
    assert_equal_on_all_ranks,
    assert_same_gradients,
    batch,
    expect,
    naive_twin,
    run_each_check,
    small_ddp,
    small_net,
)
from tests.dist.naive import average_gradients

TorchDDP = nn.parallel.DistributedDataParallel


def torch_wrapped(group: dist.ProcessGroup) -> nn.parallel.DistributedDataParallel:
    return nn.parallel.DistributedDataParallel(small_net(), process_group=group, bucket_cap_mb=25)


def gradients_after(ddp: nn.Module, group: dist.ProcessGroup, steps: int = 3) -> list[list[torch.Tensor]]:
    found = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(group, step)).square().mean().backward()
        found.append([p.grad.clone() for p in ddp.parameters()])
    return found


def check_the_allreduce_hook_gives_the_average(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    ddp.register_comm_hook(group, default_hooks.allreduce_hook)
    twin = naive_twin(ddp.module, group)
    for step in range(3):
        for net in (ddp, twin):
            net.zero_grad()
            net(batch(group, step)).square().mean().backward()
        average_gradients(twin, group)
        for p, q in zip(ddp.module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)


def check_compressing_hooks_give_what_they_give_in_torchs_class(group: dist.ProcessGroup) -> None:
    for hook in (
        default_hooks.fp16_compress_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        ours, theirs = small_ddp(group), torch_wrapped(group)
        for ddp in (ours, theirs):
            ddp.register_comm_hook(group, hook)
        for mine, other in zip(gradients_after(ours, group), gradients_after(theirs, group), strict=True):
            for a, b in zip(mine, other, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-5)


def check_the_bf16_hook_that_torchs_class_refuses_on_cpus_runs(group: dist.ProcessGroup) -> None:
    for hook in (
        default_hooks.bf16_compress_hook,
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        ddp = small_ddp(group)
        ddp.register_comm_hook(group, hook)
        twin = naive_twin(ddp.module, group)
        for net in (ddp, twin):
            net(batch(group)).square().mean().backward()
        average_gradients(twin, group)
        for p, q in zip(ddp.module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=3e-2, atol=3e-3)
            assert_equal_on_all_ranks(p.grad, group)


def check_power_sgd_gives_what_it_gives_in_torchs_class(group: dist.ProcessGroup) -> None:
    """One bucket on both sides, in the same order: PowerSGD looks at whole buckets."""
    found = []
    ours = DistributedDataParallel(small_net(), process_group=group)
    for ddp in (ours, torch_wrapped(group)):
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        found.append(gradients_after(ddp, group, steps=5))
    for mine, other in zip(*found, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def check_hooks_that_exchange_in_callbacks_are_right_with_any_number_of_buckets(group: dist.ProcessGroup) -> None:
    """PowerSGD of full rank is the average. gloo runs callbacks in an order of chance, and aborts."""
    if dist.get_backend(group) == "gloo":
        return
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for wrapper, warm in ((DistributedDataParallel, True), (DistributedDataParallel, False), (TorchDDP, True)):
            ddp = wrapper(small_net(), process_group=group, bucket_cap_mb=KIB_IN_MIB)
            twin = naive_twin(ddp.module, group)
            state = powerSGD_hook.PowerSGDState(
                group,
                matrix_approximation_rank=40,
                start_powerSGD_iter=2,
                min_compression_rate=0,
                warm_start=warm,
                use_error_feedback=warm,
            )
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            for step in range(12):
                for net in (ddp, twin):
                    net.zero_grad()
                    net(batch(group, step)).square().mean().backward()
                average_gradients(twin, group)
                for p, q in zip(ddp.module.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
    finally:
        sys.setswitchinterval(switch)


def check_torchs_replicate_runs_with_our_class_in_the_place_of_its_own(group: dist.ProcessGroup) -> None:
    net = small_net()
    twin = naive_twin(net, group)
    with mock.patch.object(sys.modules[replicate.__module__], "DistributedDataParallel", DistributedDataParallel):
        replicate(net, process_group=group, bucket_cap_mb=KIB_IN_MIB)
        for step in range(3):
            for each in (net, twin):
                each.zero_grad()
                each(batch(group, step)).square().mean().backward()
            average_gradients(twin, group)
            assert_same_gradients(net, twin, group)


def check_zero_begins_to_step_inside_torchs_hook_in_the_same_iteration_as_under_torchs_class(
    group: dist.ProcessGroup,
) -> None:
    if dist.get_backend(group) == "gloo":
        return  # torch refuses
    for hook in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        for static in (False, True):
            found = []
            for wrapper in (DistributedDataParallel, TorchDDP):
                ddp = wrapper(small_net(), process_group=group, bucket_cap_mb=KIB_IN_MIB, static_graph=static)
                zero = ZeroRedundancyOptimizer(
                    ddp.parameters(), torch.optim.SGD, process_group=group, overlap_with_ddp=True, lr=0.1
                )
                ddp.register_comm_hook(group, hook(default_hooks.allreduce_hook, ddp, zero))
                for step in range(5):
                    ddp.zero_grad()
                    ddp(batch(group, step)).square().mean().backward()
                    zero.step()
                found.append([p.detach().clone() for p in ddp.parameters()])
            for p, q in zip(*found, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def check_batched_power_sgd_which_resizes_buckets_gives_what_it_gives_in_torchs_class(group: dist.ProcessGroup) -> None:
    orthogonalize = powerSGD_hook._orthogonalize

    def of_one_matrix_too(matrices: torch.Tensor, epsilon: float = 0) -> None:
        orthogonalize(matrices if matrices.dim() == 3 else matrices[None], epsilon)  # torch 2.13 refuses it by itself

    found = []
    ours = DistributedDataParallel(small_net(), process_group=group)
    powerSGD_hook._orthogonalize = of_one_matrix_too
    try:
        for ddp in (ours, torch_wrapped(group)):
            state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
            found.append(gradients_after(ddp, group, steps=5))
    finally:
        powerSGD_hook._orthogonalize = orthogonalize
    for mine, other in zip(*found, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def check_a_hook_may_put_a_buffer_of_another_size_in_place(group: dist.ProcessGroup) -> None:
    """A hook around another one pads the bucket, and returns it with the padding."""
    ddp = small_ddp(group)

    def padded(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = [gradient.clone() for gradient in bucket.gradients()]
        bucket.set_buffer(torch.nn.functional.pad(bucket.buffer(), (0, 13)))
        assert all(torch.equal(a, b) for a, b in zip(bucket.gradients(), gradients, strict=True))
        return default_hooks.allreduce_hook(group, bucket)

    ddp.register_comm_hook(None, padded)
    twin = naive_twin(ddp.module, group)
    for net in (ddp, twin):
        net(batch(group)).square().mean().backward()
    average_gradients(twin, group)
    for p, q in zip(ddp.module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)


def check_a_hook_whose_result_is_too_short_is_told_both_sizes(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(small_net(), process_group=group)

    def halved(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer()[:100])
        return future

    ddp.register_comm_hook(None, halved)
    with expect(ValueError, "100 elements", "bucket 0", "1603", "halved"):
        ddp(batch(group)).sum().backward()


def check_zero_steps_inside_torchs_hooks_as_it_does_after_backward(group: dist.ProcessGroup) -> None:
    """The first two iterations do not step: torch's hooks learn what lies in which bucket then.

    The interleaved one broadcasts from callbacks.
    """
    if dist.get_backend(group) == "gloo":
        return  # torch refuses
    for around, cap in (
        (ddp_zero_hook.hook_with_zero_step, KIB_IN_MIB),
        (ddp_zero_hook.hook_with_zero_step_interleaved, KIB_IN_MIB),
    ):
        inside = DistributedDataParallel(small_net(), bucket_cap_mb=cap)
        zero = ZeroRedundancyOptimizer(
            inside.parameters(), optimizer_class=torch.optim.SGD, overlap_with_ddp=True, lr=0.1, momentum=0.9
        )
        inside.register_comm_hook(None, around(default_hooks.allreduce_hook, inside, zero))
        after = DistributedDataParallel(small_net())
        optimizer = torch.optim.SGD(after.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            for net in (inside, after):
                net.zero_grad()
                net(batch(group, step)).square().mean().backward()
            zero.step()
            if step >= 2:
                optimizer.step()
        for p, q in zip(inside.parameters(), after.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            assert_equal_on_all_ranks(p, group)


def check_noop_and_post_local_sgd_hooks_leave_gradients_local(group: dist.ProcessGroup) -> None:
    alone = dist.new_subgroups(group_size=1)[0]
    state = post_localSGD_hook.PostLocalSGDState(group, alone, start_localSGD_iter=1)
    for hook_state, hook in (
        (None, debugging_hooks.noop_hook),
        (state, post_localSGD_hook.post_localSGD_hook),
    ):
        ddp = small_ddp(group)
        ddp.register_comm_hook(hook_state, hook)
        local = copy.deepcopy(ddp.module)
        for step in range(3):
            for net in (ddp, local):
                net.zero_grad()
                net(batch(group, step)).square().mean().backward()
        for p, q in zip(ddp.module.parameters(), local.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


def check_a_hook_sees_every_gradient_once_and_no_padding(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    seen: list[tuple[int, bool, list[torch.Tensor], int]] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            assert parameter.shape == gradient.shape
        seen.append((bucket.index(), bucket.is_last(), bucket.parameters(), bucket.buffer().numel()))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().mul(3))
        return future

    ddp.register_comm_hook(None, hook)
    local = copy.deepcopy(ddp.module)
    for net in (ddp, local):
        net(batch(group)).sum().backward()
    assert [index for index, _, _, _ in seen] == list(range(len(seen)))
    assert [last for _, last, _, _ in seen] == [False] * (len(seen) - 1) + [True]
    assert sum(elems for _, _, _, elems in seen) == sum(p.numel() for p in ddp.parameters())
    assert {id(p) for _, _, parameters, _ in seen for p in parameters} == {id(p) for p in ddp.parameters()}
    for p, q in zip(ddp.module.parameters(), local.parameters(), strict=True):
        assert torch.equal(p.grad, 3 * q.grad)


def check_what_is_not_a_hook_is_refused_and_a_second_one_too(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    with expect(TypeError, "must be callable"):
        ddp.register_comm_hook(None, 1)
    with expect(ValueError, "needs a parameter named `bucket`"):
        ddp.register_comm_hook(None, lambda state, grads: None)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    with expect(RuntimeError, "can only be called once"):
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    assert ddp._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"
    ddp = small_ddp(group)
    ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with expect(TypeError, "returns a torch.futures.Future"):
        ddp(batch(group)).sum().backward()


def check_builtin_hooks(group: dist.ProcessGroup) -> None:
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        ddp = small_ddp(group)
        ddp._register_builtin_comm_hook(kind)
        twin = naive_twin(ddp.module, group)
        for net in (ddp, twin):
            net(batch(group)).square().mean().backward()
        average_gradients(twin, group)
        for p, q in zip(ddp.module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=5e-3, atol=1e-4)


def check_an_optimizer_inside_backward_steps_as_one_after_it(group: dist.ProcessGroup) -> None:
    after = small_ddp(group)
    optimizer = torch.optim.SGD(after.parameters(), lr=0.1, momentum=0.9)
    inside = small_ddp(group)
    inside._register_fused_optim(torch.optim.SGD, 0.1, momentum=0.9)
    hanging_model = small_net()
    _apply_optimizer_in_backward(torch.optim.SGD, hanging_model.parameters(), {"lr": 0.1, "momentum": 0.9})
    hanging = DistributedDataParallel(hanging_model, process_group=group, bucket_cap_mb=KIB_IN_MIB)
    for step in range(4):
        optimizer.zero_grad()
        inside.zero_grad()
        for net in (after, inside, hanging):
            net(batch(group, step)).square().mean().backward()
        optimizer.step()
        assert all(p.grad is None for p in hanging.parameters())
        for p, q, r in zip(after.parameters(), inside.parameters(), hanging.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-7)
            assert torch.equal(r, p)


def check_an_optimizer_inside_backward_steps_once_for_what_only_no_sync_used(group: dist.ProcessGroup) -> None:
    options = {"process_group": group, "find_unused_parameters": True, "bucket_cap_mb": KIB_IN_MIB}
    after, hanging_model = DistributedDataParallel(TwoHeads(), **options), TwoHeads()
    optimizer = torch.optim.SGD(after.parameters(), lr=0.1)
    _apply_optimizer_in_backward(torch.optim.SGD, hanging_model.parameters(), {"lr": 0.1})
    hanging = DistributedDataParallel(hanging_model, **options)
    for step in range(3):
        optimizer.zero_grad()
        for net in (after, hanging):
            with net.no_sync():
                net(batch(group, step), 1)["out"][0].square().mean().backward()
            net(batch(group, step), 0)["out"][0].square().mean().backward()
        optimizer.step()
        for p, q in zip(after.parameters(), hanging.parameters(), strict=True):
            assert torch.equal(p, q)


def check_an_optimizer_inside_backward_makes_no_step_with_what_is_not_finite(group: dist.ProcessGroup) -> None:
    model = small_net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(model, process_group=group, nan_guard=True)
    ddp(batch(group)).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with expect(NonFiniteGradientError):
        ddp(batch(group) * float("nan")).sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    with expect(PhotinusError, "SGD would step before nan_guard has looked"):
        DistributedDataParallel(small_net(), process_group=group, nan_guard=True)._register_fused_optim(
            torch.optim.SGD, 0.1
        )


def check_the_hook_that_steps_an_optimizer_of_ones_own(group: dist.ProcessGroup) -> None:
    from torch.distributed.optim import as_functional_optim

    ddp = small_ddp(group)
    state = optimizer_overlap_hooks._OptimizerHookState(as_functional_optim(torch.optim.SGD, 0.1))
    ddp.register_comm_hook(None, optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))
    before = [p.detach().clone() for p in ddp.parameters()]
    ddp(batch(group)).sum().backward()
    assert not any(torch.equal(p, q) for p, q in zip(ddp.parameters(), before, strict=True))
    for p in ddp.parameters():
        assert_equal_on_all_ranks(p, group)


def check_a_hook_goes_along_when_buckets_are_made_anew(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    ddp.register_comm_hook(group, default_hooks.allreduce_hook)
    ddp.double()
    ddp(batch(group).double()).sum().backward()
    for p in ddp.parameters():
        assert_equal_on_all_ranks(p.grad, group)
    twin = naive_twin(ddp.module, group)
    twin.zero_grad()
    twin(batch(group).double()).sum().backward()
    average_gradients(twin, group)
    if group.size() == 2:
        assert_same_gradients(ddp.module, twin, group)


test_ddp_hooks = run_each_check(__name__)
