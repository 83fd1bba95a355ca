"""The options of DistributedDataParallel: what each changes, and that none changes the averages."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.distributed import _BufferCommHookLocation, _MixedPrecision
from torch.utils.checkpoint import checkpoint

from photinus.errors import MissingGradientError, NonFiniteGradientError, PhotinusError
from photinus.parallel import DistributedDataParallel
from tests.dist.ddp_checks import (
    KIB_IN_MIB,
    TwoHeads,
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
from tests.dist.naive import average_gradients


def assert_averages_in_each_step(
    ddp: DistributedDataParallel, group: dist.ProcessGroup, *arguments: Any, steps: int = 3
) -> None:
    twin = naive_twin(ddp.module, group)
    for step in range(steps):
        for net in (ddp, twin):
            net.zero_grad()
            out = net(batch(group, step), *arguments)
            (out["out"][0] if isinstance(out, dict) else out).square().mean().backward()
        average_gradients(twin, group)
        assert_same_gradients(ddp.module, twin, group)


# ---- what becomes of gradients


def check_a_gradient_that_was_kept_survives_the_next_backwards(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(4):
        ddp.zero_grad()
        ddp(batch(group, step)).square().mean().backward()
        for index, p in enumerate(ddp.parameters()):
            if (index + step) % 3 == 0:
                kept.append((p.grad.view(-1) if step % 2 else p.grad, p.grad.clone()))
    assert all(torch.equal(a.view(-1), b.view(-1)) for a, b in kept)
    assert_averages_in_each_step(ddp, group)


def check_buckets_keep_their_memory_when_nobody_keeps_gradients(group: dist.ProcessGroup) -> None:
    for set_to_none in (True, False):
        ddp = small_ddp(group)
        addresses = []
        for step in range(5):
            ddp(batch(group, step)).square().mean().backward()
            ddp.zero_grad(set_to_none=set_to_none)
            addresses.append([bucket.flat.data_ptr() for bucket in ddp.reducer.buckets])
        assert all(later == addresses[1] for later in addresses[2:])  # after the first step they are cut anew


def check_gradients_as_views_are_written_to_by_the_next_backward(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(small_net(), process_group=group, gradient_as_bucket_view=True)
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(group, step)).square().mean().backward()
        views = [slot.view for slot in ddp.reducer.slots]
        assert all(p.grad is view for p, view in zip(ddp.parameters(), views, strict=True))
    assert_averages_in_each_step(ddp, group)


def check_a_kept_gradient_while_others_are_accumulated(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp, twin = ddp_and_twin(model, group)
    for net in (ddp, twin):
        net(batch(group, 0)).square().mean().backward()
    average_gradients(twin, group)
    kept = model[0].weight.grad
    value = kept.clone()
    for net in (model, twin):
        net[0].weight.grad = None
    for net in (ddp, twin):
        net(batch(group, 1)).square().mean().backward()
    average_gradients(twin, group)
    assert torch.equal(kept, value)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


# ---- order of buckets


class Backwards(nn.Module):
    """Uses its layers in the order opposite to that of registration."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def check_bucket_order_is_learned_in_the_first_backward_and_changes_no_bit(group: dist.ProcessGroup) -> None:
    model = Backwards()
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=KIB_IN_MIB / 4)
    first = [plan.parameters for plan in ddp.reducer.plans]
    assert_averages_in_each_step(ddp, group)
    learned = [plan.parameters for plan in ddp.reducer.plans]
    assert learned[0][0] in (0, 1)  # the layer that is used last is the first with a gradient
    assert first[0][0] == 11
    assert ddp._get_ddp_logging_data()["has_rebuilt_buckets"] == 1
    with launches() as started:
        before: list[int] = []
        model.layers[4].weight.register_hook(lambda gradient: before.append(len(started)))
        ddp(batch(group)).sum().backward()
    assert before[0] > 0


def check_rank_0_decides_on_the_order(group: dist.ProcessGroup) -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(12)
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) if group.rank() == 0 else self.a(self.b(x))

    ddp = DistributedDataParallel(Either(), process_group=group, bucket_cap_mb=KIB_IN_MIB / 16)
    assert_averages_in_each_step(ddp, group)
    order = torch.tensor([index for plan in ddp.reducer.plans for index in plan.parameters])
    assert_equal_on_all_ranks(order, group)


def check_a_list_of_capacities(group: dist.ProcessGroup) -> None:
    caps = [KIB_IN_MIB / 2, KIB_IN_MIB * 3]
    ddp = DistributedDataParallel(small_net(), process_group=group, bucket_cap_mb_list=caps)
    assert ddp.bucket_bytes_cap_list == [512, 3072]
    assert ddp.reducer.plans[0].bytes <= 512
    assert_averages_in_each_step(ddp, group)


def check_delayed_parameters_are_averaged_when_backward_returns(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp = DistributedDataParallel(
        model,
        process_group=group,
        delay_all_reduce_named_params=[("any name", model[4].weight)],
        param_to_hook_all_reduce=model[0].weight,
    )
    assert_averages_in_each_step(ddp, group)


# ---- static graph, unused parameters


def check_a_static_graph_learns_what_is_unused(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(TwoHeads(), process_group=group, static_graph=True, bucket_cap_mb=KIB_IN_MIB / 8)
    assert_averages_in_each_step(ddp, group, 0, steps=4)
    assert ddp.module.heads[1].weight.grad is None
    with expect(PhotinusError, "Your training graph has changed in this iteration", "heads.1"):
        ddp(batch(group), 1)["out"][0].sum().backward()


def check_a_static_graph_that_differs_between_ranks(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(TwoHeads(), process_group=group, static_graph=True)
    assert_averages_in_each_step(ddp, group, group.rank() % 2, steps=4)
    assert ddp.module.heads[1].weight.grad is not None
    assert ddp.module.heads[2].weight.grad is None


def check_a_static_graph_allows_reentrant_checkpoints_that_share_a_layer(group: dist.ProcessGroup) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(13)
            self.layer, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for _ in range(3):
                x = checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=True)
            return x

    ddp = DistributedDataParallel(Twice(), process_group=group)
    ddp._set_static_graph()
    assert_averages_in_each_step(ddp, group, steps=4)
    with expect(RuntimeError, "before training loop starts"):
        other = DistributedDataParallel(small_net(), process_group=group)
        other(batch(group)).sum().backward()
        other._set_static_graph()


def skipping_ddp(group: dist.ProcessGroup) -> DistributedDataParallel:
    options: dict[str, Any] = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    return DistributedDataParallel(TwoHeads(), process_group=group, bucket_cap_mb=KIB_IN_MIB / 8, **options)


def check_buckets_that_nobody_uses_can_be_left_out(group: dist.ProcessGroup) -> None:
    ddp = skipping_ddp(group)
    with launches() as started:
        assert_averages_in_each_step(ddp, group, 1, steps=1)
        assert ddp._get_ddp_logging_data()["num_buckets_reduced"] < len(ddp.reducer.plans)
    assert started


def check_gradients_from_no_sync_are_exchanged_although_this_backward_left_them_out(group: dist.ProcessGroup) -> None:
    ddp = skipping_ddp(group)
    twin = naive_twin(ddp.module, group)
    for _ in range(2):
        for net in (ddp, twin):
            net.zero_grad()
            with ddp.no_sync():
                net(batch(group), 0)["out"][0].square().mean().backward()
            net(batch(group), 1)["out"][0].square().mean().backward()
        average_gradients(twin, group)
        assert_same_gradients(ddp.module, twin, group)


def check_late_errors_come_with_the_next_forward_as_in_torchs_class(group: dist.ProcessGroup) -> None:
    class Late(DistributedDataParallel):
        late_gradient_errors = True

    ddp = Late(TwoHeads(), process_group=group)
    ddp(batch(group), 0)["out"][0].sum().backward()
    with expect(MissingGradientError, "Expected to have finished reduction in the prior iteration", "heads.1.weight"):
        ddp(batch(group), 0)


# ---- precision, guard, buffers


def check_mixed_precision_computes_low_and_keeps_full_parameters(group: dist.ProcessGroup) -> None:
    seen: list[torch.dtype] = []

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()
            self.register_buffer("offset", torch.ones(6))
            self.register_buffer("count", torch.ones(1, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend([x.dtype, self.net[0].weight.dtype, self.offset.dtype, self.count.dtype])
            return self.net(x + self.offset)

    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    ddp = DistributedDataParallel(Seeing(), process_group=group, mixed_precision=config)
    low = copy.deepcopy(ddp.module).bfloat16()
    for step in range(2):
        for net in (ddp, low):
            net.zero_grad()
            net(batch(group, step).bfloat16() if net is low else batch(group, step)).float().square().mean().backward()
        for p, q in zip(ddp.module.parameters(), low.parameters(), strict=True):
            assert p.dtype == p.grad.dtype == torch.float32
            local = q.grad.float()
            dist.all_reduce(local, group=group)
            torch.testing.assert_close(p.grad, local / group.size(), rtol=1e-5, atol=1e-6)
            assert_equal_on_all_ranks(p.grad, group)
    assert seen[:4] == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int64]
    with expect(ValueError, "not a floating dtype"):
        wrong = _MixedPrecision(param_dtype=torch.int8)
        DistributedDataParallel(small_net(), process_group=group, mixed_precision=wrong)
    with expect(TypeError, "needs an object with param_dtype", "got a dtype"):
        DistributedDataParallel(small_net(), process_group=group, mixed_precision=torch.bfloat16)


def check_the_nan_guard_names_rank_and_parameter_everywhere(group: dist.ProcessGroup) -> None:
    last = group.size() - 1
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        ddp = DistributedDataParallel(
            small_net(), process_group=group, nan_guard=True, bucket_cap_mb=KIB_IN_MIB, **options
        )
        assert_averages_in_each_step(ddp, group)
        x = batch(group)
        if group.rank() == last:
            x[0, 0] = float("inf")
        with expect(NonFiniteGradientError, f"rank {last} made", "parameter 4."):
            ddp(x).square().mean().backward()
        ddp.zero_grad()
        assert_averages_in_each_step(ddp, group)


def check_the_nan_guard_looks_at_sparse_gradients(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    ddp = DistributedDataParallel(model, process_group=group, nan_guard=True)
    words, last = torch.tensor([group.rank(), 3]), group.size() - 1
    ddp(words).sum().backward()
    if group.rank() == last:  # the embedding's gradient alone: the layer above has made its own before
        model[0].register_full_backward_pre_hook(lambda _, gradients: tuple(g * float("nan") for g in gradients))
    with expect(NonFiniteGradientError, f"rank {last} made", "parameter 0.weight"):
        ddp(words).sum().backward()


def check_the_nan_guard_tells_large_sums_from_infinity(group: dist.ProcessGroup) -> None:
    model = nn.Linear(6, 2, bias=False)
    ddp = DistributedDataParallel(model, process_group=group, nan_guard=True)
    x = torch.full((1, 6), 1e38)
    ddp(x).sum().backward()
    assert torch.isfinite(model.weight.grad).all()


def check_a_buffer_hook_takes_the_place_of_the_broadcast(group: dist.ProcessGroup) -> None:
    for location in _BufferCommHookLocation:
        model = nn.Sequential(nn.BatchNorm1d(6, momentum=1.0), nn.Linear(6, 2))
        ddp = DistributedDataParallel(model, process_group=group)

        def total(state: object, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future[Any]]:
            return [dist.all_reduce(buffers["0.running_mean"], group=group, async_op=True).get_future()]

        ddp._register_buffer_comm_hook(None, total, location)
        ddp(batch(group)).sum().backward()
        if location == _BufferCommHookLocation.POST_FORWARD:
            mean = batch(group).mean(0)
            dist.all_reduce(mean, group=group)
            torch.testing.assert_close(model[0].running_mean, mean)


def check_buffers_are_left_alone_or_only_made_equal_at_construction(group: dist.ProcessGroup) -> None:
    def model() -> nn.Module:
        net = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
        net[0].running_mean.fill_(group.rank())
        return net

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        left = DistributedDataParallel(model(), process_group=group, broadcast_buffers=False)
    assert any("forward_sync_buffers" in str(warning.message) for warning in caught)
    assert left.module[0].running_mean[0] == group.rank()
    once = DistributedDataParallel(model(), process_group=group, forward_sync_buffers=False)
    assert once.module[0].running_mean[0] == 0
    assert not once.will_sync_module_buffers()


# ---- groups, compiler, being torch's class


def check_a_mesh_of_one_dimension_gives_the_group(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    ddp = DistributedDataParallel(small_net(), device_mesh=mesh)
    assert ddp.device_mesh is mesh
    assert_averages_in_each_step(ddp, group)
    with expect(ValueError, "Cannot specify both"):
        DistributedDataParallel(small_net(), device_mesh=mesh, process_group=group)
    flat = DeviceMesh("cpu", torch.arange(group.size()).view(1, -1))
    with expect(ValueError, "Only 1D device mesh is supported"):
        DistributedDataParallel(small_net(), device_mesh=flat)


def check_the_compiler_over_and_inside_the_wrapper(group: dist.ProcessGroup) -> None:
    if dist.get_backend(group) != "photinus" or group.size() > 2:
        return  # graphs are cut by buckets, whatever carries them; compiling takes a third of all checks' time
    for inside in (False, True):
        torch.manual_seed(15)
        model = nn.Sequential(nn.Linear(6, 700), *(nn.Linear(700, 700) for _ in range(3)), nn.Linear(700, 3))
        twin = naive_twin(model, group)
        core = torch.compile(model, backend="aot_eager") if inside else model
        ddp = DistributedDataParallel(core, process_group=group, bucket_cap_mb=1)
        run = ddp if inside else torch.compile(ddp, backend="aot_eager")
        for step in range(3):
            for net in (run, twin):
                net.zero_grad()
            with launches() as started:
                before: list[int] = []
                handle = model[0].weight.register_hook(lambda gradient, s=started, b=before: b.append(len(s)))
                run(batch(group, step)).square().mean().backward()
                handle.remove()
            twin(batch(group, step)).square().mean().backward()
            average_gradients(twin, group)
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
            if not inside:
                assert before[0] > 0, "the compiled backward is one piece: nothing overlaps"


@dataclass
class Nested:
    first: torch.Tensor
    rest: dict[str, tuple[torch.Tensor, ...]]


def check_nested_outputs_and_dataclasses(group: dist.ProcessGroup) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(14)
            self.a, self.b, self.c = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> Nested:
            return Nested(self.a(x), {"b": (self.b(x),)})

    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        ddp = DistributedDataParallel(Model(), process_group=group, **options)
        twin = naive_twin(ddp.module, group)
        for _ in range(2):
            for net in (ddp, twin):
                net.zero_grad()
                out = net(batch(group))
                (out.first.sum() + out.rest["b"][0].sum()).backward()
            average_gradients(twin, group)
            assert_same_gradients(ddp.module, twin, group)


def check_logging_data_and_the_surface_that_libraries_touch(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(small_net(), process_group=group)
    ddp._set_ddp_runtime_logging_sample_rate(1)
    assert_averages_in_each_step(ddp, group)
    data = ddp._get_ddp_logging_data()
    assert data["world_size"] == group.size()
    assert data["can_set_static_graph"] == 1
    assert data["iteration"] == 2
    assert data["avg_backward_comm_time"] >= 1
    assert isinstance(ddp, nn.parallel.DistributedDataParallel)
    assert ddp.require_forward_param_sync
    assert ddp.join_process_group is group
    assert [p.shape for p in nn.parallel.DistributedDataParallel._get_data_parallel_params(ddp.module)] == [
        p.shape for p in ddp.parameters()
    ]
    ddp._check_reducer_finalized()
    with expect(ValueError, "sample_rate=0"):
        ddp._set_ddp_runtime_logging_sample_rate(0)


test_ddp_options = run_each_check(__name__)
