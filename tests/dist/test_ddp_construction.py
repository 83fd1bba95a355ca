"""What DistributedDataParallel does when it is made, before forwards, and when it goes."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.optimizer import register_optimizer_step_post_hook

from photinus.errors import DeviceError, MissingGradientError, ModelMismatchError, PhotinusError, UnsuitableModelError
from photinus.parallel import DistributedDataParallel
from photinus.parallel.exchange.verify_models import verify_same_model
from tests.dist.ddp_checks import (
    KIB_IN_MIB,
    SharedFrozenMixed,
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

# ---- construction


def check_parameters_and_buffers_become_those_of_rank_0(group: dist.ProcessGroup) -> None:
    torch.manual_seed(group.rank())
    model = SharedFrozenMixed()
    for parameter in model.parameters():
        parameter.data.add_(group.rank())
    model.register_buffer("steps", torch.tensor([group.rank()]))
    model.register_buffer("flags", torch.tensor([group.rank() == 0, True]))
    model.register_buffer("mine", torch.tensor([group.rank()]))
    model.register_buffer("conjugate", torch.tensor([1 + 2j + group.rank()]).conj())
    model.register_buffer("negative", torch.tensor([1 + 2j + 1j * group.rank()]).conj().imag)
    model._ddp_params_and_buffers_to_ignore = ["mine", "wide.bias"]
    own = model.wide.bias.clone()
    ddp = DistributedDataParallel(model, process_group=group)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in ("mine", "wide.bias"):
            assert_equal_on_all_ranks(tensor.double() if not tensor.is_complex() else tensor.resolve_conj(), group)
    assert model.steps.item() == 0
    assert model.conjugate.is_conj()
    assert model.negative.is_neg()
    assert (model.conjugate.item(), model.negative.item()) == (1 - 2j, -2)
    assert model.mine.item() == group.rank()
    assert torch.equal(model.wide.bias, own)
    ddp(batch(group)).backward()
    assert_equal_on_all_ranks(model.wide.weight.grad, group)
    assert group.rank() == 0 or model.mine.item() == group.rank()


def check_large_models_are_broadcast_in_pieces(group: dist.ProcessGroup) -> None:
    from photinus.parallel.exchange.broadcast import _pieces, broadcast_tensors

    torch.manual_seed(group.rank())
    tensors = [torch.randn(1000), torch.randn(3, 5).t(), torch.randn(50, 40).t(), torch.zeros(0), torch.ones(7).bool()]
    broadcast_tensors(tensors, group, torch.device("cpu"), piece_bytes=600)
    torch.manual_seed(0)
    expected = [torch.randn(1000), torch.randn(3, 5).t(), torch.randn(50, 40).t()]
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=False))
    for piece in _pieces([*tensors, *(torch.zeros(70) for _ in range(5))], 600):
        staged_whole = len(piece) == 1 and not piece[0].is_contiguous()
        assert sum(part.nbytes for part in piece) <= 600 or staged_whole


def check_only_models_that_differ_are_broadcast(group: dist.ProcessGroup) -> None:
    from photinus.parallel.exchange import broadcast

    def sent(tensors: list[torch.Tensor]) -> bool:
        calls = list[int]()
        start, broadcast.Staging.start = broadcast.Staging.start, lambda *args: calls.append(1) or start(*args)
        try:
            broadcast.broadcast_tensors(tensors, group, torch.device("cpu"))
        finally:
            broadcast.Staging.start = start
        return bool(calls)

    def equal() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(30, 5).t(), torch.randn(7).bfloat16(), torch.zeros(0), torch.arange(512).conj()]

    assert not sent(equal())
    for change in (
        lambda tensors: tensors[0].view(torch.int32)[3, 4].bitwise_xor_(1),
        lambda tensors: tensors[1][6].neg_(),
        lambda tensors: tensors[3].copy_(torch.randperm(512)),  # the sum of all words stays the same
    ):
        tensors = equal()
        if group.rank() == group.size() - 1:
            change(tensors)
        assert sent(tensors)
        assert all(torch.equal(a, b) for a, b in zip(tensors, equal(), strict=True))
    # The same bytes in memory are other values where strides differ, which buffers may.
    whole = torch.arange(12.0)
    buffer = whole.clone().view(3, 4) if group.rank() == 0 else whole.clone().view(4, 3).t()
    assert sent([buffer])
    assert torch.equal(buffer, whole.view(3, 4))


def check_states_of_all_ranks_come_to_rank_0_as_they_are(group: dist.ProcessGroup) -> None:
    from photinus.parallel.zero.split_states import gather_states

    def state(rank: int) -> dict[Any, Any]:
        tensors = [torch.full((2, 3), float(rank)).t(), torch.tensor(rank).bfloat16(), torch.zeros(0, 4)]
        return {0: {"betas": (0.9, rank), "list": [None, True, "x"], "tensors": tensors}, "name": 1.5}

    found = gather_states(state(group.rank()), group)
    assert len(found) == (group.size() if group.rank() == 0 else 0)
    for rank, each in enumerate(found):
        tensors, wanted = each[0].pop("tensors"), state(rank)
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted[0].pop("tensors"), strict=True))
        assert [tensor.dtype for tensor in tensors] == [torch.float32, torch.bfloat16, torch.float32]
        assert each == wanted
        assert type(each[0]["betas"]) is tuple


def check_different_models_are_refused_on_every_rank_within_a_second(group: dist.ProcessGroup) -> None:
    last = group.size() - 1

    def refused(change: Any, *fragments: str, **options: Any) -> None:
        model = small_net()
        if group.rank() == last:
            model = change(model) or model
        dist.barrier(group)
        started = time.monotonic()
        with expect(ModelMismatchError, *fragments, f"rank {last}: "):
            DistributedDataParallel(model, process_group=group, **options)
        assert time.monotonic() - started < 1

    refused(
        lambda m: m.__setattr__("2", nn.Linear(40, 31)),
        "hold different models. First difference: rank",
        "parameter 2.weight: float32 [30, 40]",
        "parameter 2.weight: float32 [31, 40]",
    )
    refused(lambda m: nn.Sequential(m[0], m[1], m[3], m[2], m[4]), "parameter 2.weight", "parameter 3.weight")
    refused(lambda m: m[4].double() and None, "4.weight: float32", "4.weight: float64")
    refused(lambda m: m[0].requires_grad_(False) and None, "0.weight: float32 [40, 6], requires grad", "frozen")
    refused(
        lambda m: m[:4], "4.weight", "no further parameter or buffer", "models (4 and 6 parameters and buffers). First"
    )
    refused(lambda m: m.register_buffer("count", torch.zeros(1)), "buffer count", "no further parameter or buffer")
    refused(
        lambda m: m.__setattr__("extra", nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)),
        "parameter extra.weight",
    )
    for option, value, words in (
        ("bucket_cap_mb", 1, "bucket_cap_bytes=1048576"),
        ("broadcast_buffers", False, "forward_sync_buffers=False"),
        ("find_unused_parameters", True, "find_unused_parameters=True"),
        ("static_graph", True, "static_graph=True"),
        ("skip_all_reduce_unused_params", True, "skip_all_reduce_unused_params=True"),
        ("mixed_precision", _MixedPrecision(param_dtype=torch.bfloat16), "param_dtype=torch.bfloat16"),
        ("nan_guard", True, "nan_guard=True"),
        ("check_ranks", False, "check_ranks=False"),
        ("wire_dtype", torch.bfloat16, "wire_dtype=torch.bfloat16"),
    ):
        refused(lambda m: None, words, **({option: value} if group.rank() == last else {}))


def check_what_one_rank_refuses_is_its_own_error_there_and_named_on_others(group: dist.ProcessGroup) -> None:
    """`device_ids=[local_rank]` for a model on the CPU, on all ranks: each says so, not that models differ."""
    with expect(UnsuitableModelError, f"device_ids=[{group.rank()}]", "on the CPU", "leave device_ids out"):
        DistributedDataParallel(small_net(), process_group=group, device_ids=[group.rank()])
    for change, words in (
        ({"device_ids": [1]}, "device_ids=[1], but the model is on the CPU"),
        ({"module": small_net().requires_grad_(False)}, "Sequential has no parameter that requires grad"),
    ):
        given = {"module": small_net(), "process_group": group}
        if group.rank() == 1:
            with expect(UnsuitableModelError, words):
                DistributedDataParallel(**{**given, **change})
        else:
            with expect(ModelMismatchError, f"rank 1: {words}", "options:"):
                DistributedDataParallel(**given)


def check_two_ranks_on_one_gpu_are_refused_with_both_named(group: dist.ProcessGroup) -> None:
    """Played: the ranks have no GPU, and say that they have the same one."""
    last = group.size() - 1
    verify_same_model(["same"], group, f"GPU {group.rank()} of host a")
    shared = f"GPU {group.rank() % last} of host a"
    with expect(DeviceError, f"ranks 0, {last} all compute on GPU 0 of host a", "PHOTINUS_RANKS_PER_GPU=2"):
        verify_same_model(["same"], group, shared)
    os.environ["PHOTINUS_RANKS_PER_GPU"] = "2"
    try:
        verify_same_model(["same"], group, shared)
    finally:
        del os.environ["PHOTINUS_RANKS_PER_GPU"]


def check_without_init_sync_nothing_is_exchanged_at_construction(group: dist.ProcessGroup) -> None:
    model = small_net(seed=group.rank())
    before = copy.deepcopy(model)
    for rank in range(2):  # one after the other: who needed an answer would wait for it until the deadline
        if rank == group.rank():
            DistributedDataParallel(model, process_group=group, init_sync=False)
        dist.barrier(group)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


# ---- buffers


def check_buffers_are_those_of_rank_0_when_backward_has_ended(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
    ddp = DistributedDataParallel(model, process_group=group)
    mean = model[0].running_mean

    def differ() -> bool:
        everyone = [torch.empty_like(mean) for _ in range(group.size())]
        dist.all_gather(everyone, mean, group=group)
        return not all(torch.equal(everyone[0], other) for other in everyone)

    output = ddp(batch(group, 0))
    assert differ()  # each rank has counted its own batch
    of_rank_0 = mean.clone()
    output.sum().backward()
    assert not differ()
    assert group.rank() or torch.equal(mean, of_rank_0)
    with ddp.no_sync():
        ddp(batch(group, 1)).sum().backward()
    assert differ()
    ddp(batch(group, 2)).sum().backward()
    assert not differ()
    model[0].running_mean = mean = torch.full((6,), float(group.rank()))  # replaced by the module
    ddp.eval()(batch(group, 1)).sum().backward()
    assert mean.sum() == 0

    untouched = DistributedDataParallel(
        nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)), process_group=group, broadcast_buffers=False
    )
    untouched.module[0].running_mean.fill_(group.rank())
    untouched.eval()(batch(group, 1)).sum().backward()
    assert untouched.module[0].running_mean.sum() == 6 * group.rank()


def check_rank_0_may_evaluate_alone_with_and_without_grad(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)), process_group=group)
    for step in range(3):
        ddp(batch(group, step)).sum().backward()
        if group.rank() == 0 and step:  # the first step is followed by the cutting of the buckets
            with torch.set_grad_enabled(step == 2):
                ddp.eval()(batch(group))
            ddp.train()
    ddp(batch(group)).sum().backward()
    assert_equal_on_all_ranks(ddp.module[0].running_var, group)


def check_a_graph_that_is_kept_may_run_backward_again(group: dist.ProcessGroup) -> None:
    """What it saved, buffers among it, is not written to by the end of the first."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)
            self.register_buffer("scale", torch.full((2,), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scale

    ddp = DistributedDataParallel(Scaled(), process_group=group)
    loss = ddp(batch(group)).sum()
    loss.backward(retain_graph=True)
    first = ddp.module.layer.weight.grad.clone()
    ddp.zero_grad()
    loss.backward()
    assert torch.equal(ddp.module.layer.weight.grad, first)


# ---- life of the wrapper


def check_a_dropped_wrapper_no_longer_exchanges(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp = DistributedDataParallel(model, process_group=group)
    ddp(batch(group)).sum().backward()
    del ddp
    model.zero_grad()
    with launches() as started:
        model(batch(group)).sum().backward()
    assert started == []
    ddp = DistributedDataParallel(model, process_group=group)
    with launches() as started:
        ddp(batch(group)).sum().backward()
    assert len(started) == len(ddp.reducer.plans)


def check_stop_ends_the_exchange(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(small_net(), process_group=group)
    ddp.reducer.stop()
    ddp.reducer.stop()
    with launches() as started:
        ddp(batch(group)).sum().backward()
    assert started == []


def check_reducer_attributes_of_haiscale_and_accelerate(group: dist.ProcessGroup) -> None:
    model = TwoHeads()
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    with ddp.no_sync():
        output = ddp(batch(group), 0)
        assert not ddp.reducer.forward_syncs
    ddp.reducer.prepare_for_backward([])  # what Accelerate calls to exchange after all
    ddp.reducer.filter_unused_parameters(output)
    output["out"][0].sum().backward()
    assert_equal_on_all_ranks(model.trunk.weight.grad, group)
    assert ddp.reducer._rebuild_buckets() is False


def check_sync_grad_holds_until_it_is_set_again(group: dist.ProcessGroup) -> None:
    model = small_net()
    ddp, twin = ddp_and_twin(model, group)
    ddp.reducer.sync_grad = False
    for step in range(2):
        for net in (ddp, twin):
            net(batch(group, step)).sum().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    ddp.reducer.sync_grad = True
    for net in (ddp, twin):
        net(batch(group, 2)).sum().backward()
    average_gradients(twin, group)
    assert_same_gradients(model, twin, group)


def check_a_wrapper_may_go_while_a_compiler_traces(group: dist.ProcessGroup) -> None:
    """The garbage collector may end it at any time, and what it touches then is no tensor of the compiler's."""
    ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    with FakeTensorMode():
        ddp.reducer.stop()
    assert not ddp.reducer.active


def check_a_wrapper_may_go_while_an_optimizer_steps(group: dist.ProcessGroup) -> None:
    """The garbage collector may end it while torch walks through what is to be called after a step."""
    going: list[DistributedDataParallel] = []

    def collect(*_: Any) -> None:
        going.clear()
        gc.collect()

    handle = register_optimizer_step_post_hook(collect)  # before all that a wrapper may register
    try:
        going.append(DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group))
        ddp = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
        ddp(torch.ones(1, 3)).sum().backward()
        torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    finally:
        handle.remove()


def check_filtering_by_hand_keeps_the_error_for_missing_gradients_away(group: dist.ProcessGroup) -> None:
    """On the ranks that use one head of two; others use both. The third is used by nobody."""
    model = TwoHeads()
    ddp, twin = ddp_and_twin(model, group, bucket_cap_mb=KIB_IN_MIB / 8)
    for step in range(3):
        for net in (ddp, twin):
            net.zero_grad()
            outputs = [net(batch(group, step), head) for head in range(2 if group.rank() else 1)]
            if net is ddp:
                ddp.reducer.filter_unused_parameters(outputs)
            sum(output["out"][0].sum() for output in outputs).backward()
        average_gradients(twin, group)
        assert model.heads[2].weight.grad.count_nonzero() == 0
        del model.heads[2].weight.grad, model.heads[2].bias.grad
        assert_same_gradients(model, twin, group)
    with expect(MissingGradientError, "heads.2.weight"):  # it is for one backward
        ddp(batch(group), 0)["out"][0].sum().backward()


def check_copies_join_the_default_group_and_others_are_refused(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(small_net())
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        ddp.zero_grad()
        ddp(batch(group)).sum().backward()
        twin(batch(group)).sum().backward()
        assert_same_gradients(twin, ddp, group)
    with expect(PhotinusError, ".module"):
        pickle.dumps(DistributedDataParallel(small_net(), process_group=group))


def check_buckets_follow_a_change_of_dtype(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(small_net(), process_group=group).double()
    twin = naive_twin(ddp.module, group)
    for net in (ddp, twin):
        net(batch(group).double()).sum().backward()
    average_gradients(twin, group)
    assert ddp.reducer.plans[0].dtype == torch.float64
    assert_same_gradients(ddp.module, twin, group)


def check_distributed_checkpoint_sees_plain_names(group: dist.ProcessGroup) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = small_net()
    ddp = DistributedDataParallel(model, process_group=group)
    assert isinstance(ddp, nn.parallel.DistributedDataParallel)
    assert list(get_model_state_dict(ddp)) == list(model.state_dict())
    assert list(ddp.state_dict()) == [f"module.{name}" for name in model.state_dict()]


def check_buckets_lie_in_the_groups_memory_where_it_offers_some(group: dist.ProcessGroup) -> None:
    offered: list[torch.Tensor] = []
    if hasattr(group, "allocate_tensor"):
        allocate_tensor = group.allocate_tensor

        def recorded(size: int, dtype: torch.dtype) -> torch.Tensor:
            offered.append(allocate_tensor(size, dtype))
            return offered[-1]

        group.allocate_tensor = recorded
    ddp = small_ddp(group)
    in_offered = {b.flat.data_ptr() for b in ddp.reducer.buckets} <= {tensor.data_ptr() for tensor in offered}
    assert in_offered == (dist.get_backend(group) == "photinus")
    ddp(batch(group)).sum().backward()
    assert_equal_on_all_ranks(next(ddp.parameters()).grad, group)


test_ddp_construction = run_each_check(__name__)
