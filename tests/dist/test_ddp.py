"""DistributedDataParallel on several ranks: what it exchanges, when, and what it says when something is wrong.

Starting processes costs seconds, so one run per backend and world size does all checks, each over a group of its own
with a short deadline; every check is then a test with its own name.
"""

from __future__ import annotations

import copy
import datetime
import importlib
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from photinus.errors import MissingGradientError, ModelMismatchError, PhotinusError
from photinus.parallel import DistributedDataParallel, average_gradients, broadcast_model
from photinus.parallel.exchange import Average
from tests.ranks import RanksFailedError, run_ranks, values

KIB_IN_MIB = 1 / 1024
"""A bucket cap, in MiB, so small that small test models have many buckets."""

BACKENDS = [
    "gloo",
    pytest.param(
        "photinus",
        marks=pytest.mark.skipif(
            "photinus" not in dist.Backend.backend_list, reason="backend photinus is not installed here"
        ),
    ),
]


# ---- running many checks in one set of processes (the other test files of this room use it too)

CHECKED_MODULES = (
    "tests.dist.test_ddp",
    "tests.dist.test_ddp_hooks",
    "tests.dist.test_ddp_join",
    "tests.dist.test_ddp_options",
    "tests.dist.test_sync_batch_norm",
    "tests.parity.test_ddp",
)

Outcome = dict[str, str | None]
"""Traceback of each check that failed on a rank, None for one that passed."""


def run_checks(rank: int, world_size: int) -> Outcome:
    """Runs every check of the modules on this rank."""
    outcome: Outcome = {}
    for module in CHECKED_MODULES:
        for name, check in checks_of(vars(importlib.import_module(module))).items():
            torch.manual_seed(1234 + rank)
            group = dist.new_group(timeout=datetime.timedelta(seconds=25))
            try:
                check(group)
                outcome[f"{module}:{name}"] = None
            except Exception:  # noqa: BLE001 - reported as the check's outcome
                outcome[f"{module}:{name}"] = traceback.format_exc()
    return outcome


def checks_of(namespace: Mapping[str, Any]) -> dict[str, Callable[[dist.ProcessGroup], None]]:
    return {name: value for name, value in namespace.items() if name.startswith("check_")}


@cache
def outcomes(backend: str, world_size: int) -> list[Outcome] | RanksFailedError:
    """Every rank's outcomes, or why there are none; the processes run once per backend and world size."""
    try:
        return values(
            run_ranks("tests.dist.test_ddp:run_checks", world_size=world_size, backend=backend, timeout_s=220)
        )
    except RanksFailedError as error:
        return error


def assert_check(module: str, name: str, backend: str, world_size: int) -> None:
    results = outcomes(backend, world_size)
    if isinstance(results, RanksFailedError):
        pytest.fail(str(results), pytrace=False)
    found = [outcome[f"{module}:{name}"] for outcome in results]
    failed = [f"----- rank {rank}\n{text}" for rank, text in enumerate(found) if text is not None]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)


def assert_close_in(dtype: torch.dtype, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal to 1e-6 of the largest element, or to two units in the last place of a half-precision dtype."""
    tolerance = max(1e-6, 2 * torch.finfo(dtype).eps if dtype.itemsize < 4 else 0.0)
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale, msg=what)


# ---- models


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3))


class TwoHeads(nn.Module):
    """Uses the head it is told to; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(6, 20)
        self.heads = nn.ModuleList([nn.Linear(20, 2) for _ in range(3)])

    def forward(self, x: torch.Tensor, head: int) -> dict[str, list[torch.Tensor]]:
        return {"out": [self.heads[head](torch.tanh(self.trunk(x)))]}


def batch(group: dist.ProcessGroup, step: int = 0) -> torch.Tensor:
    """Another batch on each rank and in each step."""
    generator = torch.Generator().manual_seed(1000 * group.rank() + step)
    return torch.randn(5, 6, generator=generator)


def naive_twin(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    twin = copy.deepcopy(model)
    broadcast_model(twin, group)
    return twin


def assert_same_gradients(model: nn.Module, reference: nn.Module, group: dist.ProcessGroup) -> None:
    """Bit for bit, but for gloo with 3 ranks and more, whose order of addition depends on the position in a buffer."""
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is None:
            continue
        if group.size() == 2 or dist.get_backend(group) == "photinus":
            assert torch.equal(p.grad, q.grad), (name, (p.grad - q.grad).abs().max())
        else:
            assert_close_in(p.dtype, p.grad, q.grad, name)


def assert_equal_on_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    everyone = [torch.empty_like(tensor.contiguous()) for _ in range(group.size())]
    dist.all_gather(everyone, tensor.detach().contiguous(), group=group)
    assert all(torch.equal(everyone[0], other) for other in everyone)


@contextmanager
def expect(error: type[BaseException], *fragments: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    for fragment in fragments:
        assert fragment in str(caught.value), f"{fragment!r} is not in: {caught.value}"


@contextmanager
def launches() -> Iterator[list[int]]:
    """Collects the element count of every average that is started."""
    started: list[int] = []
    start = Average.start

    def recorded(self: Average, tensor: torch.Tensor) -> Any:
        started.append(tensor.numel())
        return start(self, tensor)

    Average.start = recorded  # type: ignore[method-assign]
    try:
        yield started
    finally:
        Average.start = start  # type: ignore[method-assign]


# ---- gradients


def check_gradients_are_those_of_the_naive_all_reduce(group: dist.ProcessGroup) -> None:
    model = small_net(seed=group.rank())  # other weights on each rank: construction has to make them equal
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=KIB_IN_MIB)
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
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group)
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
    ddp = DistributedDataParallel(small_net(), process_group=group, bucket_cap_mb=KIB_IN_MIB)
    with launches() as started:
        before_last: list[int] = []
        first_layer = ddp.module[0].weight  # its gradient is the last
        first_layer.register_hook(lambda gradient: before_last.append(len(started)))
        ddp(batch(group)).square().mean().backward()
    assert before_last == [len(ddp.reducer.plans) - 1]
    assert len(started) == len(ddp.reducer.plans)


def check_no_sync_accumulates_and_the_next_backward_averages_the_sum(group: dist.ProcessGroup) -> None:
    model = small_net()
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=KIB_IN_MIB)
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
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group)
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
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group)
    loss = ddp(batch(group)).square().mean()
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    (4 * twin(batch(group)).square().mean()).backward()
    average_gradients(twin, group)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


class SharedFrozenMixed(nn.Module):
    """Shared weights, a frozen layer, several dtypes, a channels_last weight, a gradient that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.wide = nn.Linear(6, 4, dtype=torch.float64)
        self.narrow = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.factors = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.convolution = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(4, 5))
        self.strided = nn.Parameter(torch.randn(8, 3)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.second(torch.tanh(self.first(torch.tanh(self.first(x))))))
        y = self.narrow(self.wide(x.double()).to(torch.bfloat16)).float()
        y = (y * self.factors).abs() @ self.transposed.t().reshape(5, 4).t()
        image = y[None, :4, :4].expand(2, 4, 4)[None].contiguous(memory_format=torch.channels_last)
        return self.convolution(image).square().mean() + y.square().mean() + self.strided.square().sum()


def check_shared_frozen_and_mixed_parameters(group: dist.ProcessGroup) -> None:
    model = SharedFrozenMixed()
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=KIB_IN_MIB)
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
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group)
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
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group)
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
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group)
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
            twin = naive_twin(model, group)
            ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=KIB_IN_MIB / 16)
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
        twin = naive_twin(model, group)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=KIB_IN_MIB / 16)
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


# ---- unused parameters and errors


def check_a_parameter_without_gradient_is_named_on_every_rank(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(TwoHeads(), process_group=group, bucket_cap_mb=KIB_IN_MIB / 8)
    for _ in range(2):  # the error leaves nothing behind
        with expect(MissingGradientError, "heads.2.weight [2, 20]", "heads.1.bias", "4 of 8", "find_unused_parameters"):
            ddp(batch(group), 0)["out"][0].sum().backward()


def check_a_parameter_without_gradient_on_one_rank_fails_all_together(group: dist.ProcessGroup) -> None:
    model = TwoHeads()
    del model.heads[2]
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=KIB_IN_MIB / 8)

    def loss(heads: list[int]) -> torch.Tensor:
        return sum(ddp(batch(group), head)["out"][0].sum() for head in heads)

    if group.rank() == 1:
        with expect(MissingGradientError, "rank 1: 2 of 6", "heads.1.weight", "heads.1.bias"):
            loss([0]).backward()
    else:
        with expect(MissingGradientError, f"rank {group.rank()}: the backward of rank 1 went wrong"):
            loss([0, 1]).backward()
    ddp.zero_grad()
    loss([0, 1]).backward()
    assert_equal_on_all_ranks(model.heads[1].weight.grad, group)


def check_an_exception_in_backward_leaves_the_reducer_usable(group: dist.ProcessGroup) -> None:
    model = small_net()
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=KIB_IN_MIB)

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


def check_an_exception_on_one_rank_fails_the_others_and_all_can_go_on(group: dist.ProcessGroup) -> None:
    ddp = DistributedDataParallel(small_net(), process_group=group, bucket_cap_mb=KIB_IN_MIB)

    def explode(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("on rank 0 only")

    if group.rank() == 0:
        hook = ddp.module[2].weight.register_hook(explode)
        with expect(ZeroDivisionError):
            ddp(batch(group)).sum().backward()
        hook.remove()
    else:
        with expect(MissingGradientError, "the backward of rank 0 went wrong"):
            ddp(batch(group)).sum().backward()
    ddp.zero_grad()
    ddp(batch(group)).sum().backward()
    assert_equal_on_all_ranks(ddp.module[0].weight.grad, group)


def check_find_unused_parameters_averages_what_some_rank_used(group: dist.ProcessGroup) -> None:
    model = TwoHeads()
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True, bucket_cap_mb=KIB_IN_MIB / 8)
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
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
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
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    for net in (ddp, twin):
        x = batch(group).requires_grad_()
        net(x, group.rank() == 0).sum().backward()
    average_gradients(twin, group)
    assert_same_gradients(model, twin, group)


def check_find_unused_parameters_over_several_forwards(group: dist.ProcessGroup) -> None:
    model = TwoHeads()
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True, bucket_cap_mb=KIB_IN_MIB / 8)
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
    twin = naive_twin(model, group)
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
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


# ---- construction


def check_parameters_and_buffers_become_those_of_rank_0(group: dist.ProcessGroup) -> None:
    torch.manual_seed(group.rank())
    model = SharedFrozenMixed()
    for parameter in model.parameters():
        parameter.data.add_(group.rank())
    model.register_buffer("steps", torch.tensor([group.rank()]))
    model.register_buffer("flags", torch.tensor([group.rank() == 0, True]))
    model.register_buffer("mine", torch.tensor([group.rank()]))
    model._ddp_params_and_buffers_to_ignore = ["mine", "wide.bias"]
    own = model.wide.bias.clone()
    ddp = DistributedDataParallel(model, process_group=group)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in ("mine", "wide.bias"):
            assert_equal_on_all_ranks(tensor.double() if not tensor.is_complex() else tensor, group)
    assert model.steps.item() == 0
    assert model.mine.item() == group.rank()
    assert torch.equal(model.wide.bias, own)
    ddp(batch(group)).backward()
    assert_equal_on_all_ranks(model.wide.weight.grad, group)
    assert group.rank() == 0 or model.mine.item() == group.rank()


def check_large_models_are_broadcast_in_pieces(group: dist.ProcessGroup) -> None:
    from photinus.parallel.broadcast import broadcast_tensors

    torch.manual_seed(group.rank())
    tensors = [torch.randn(1000), torch.randn(3, 5).t(), torch.randn(50, 40).t(), torch.zeros(0), torch.ones(7).bool()]
    broadcast_tensors(tensors, group, torch.device("cpu"), piece_bytes=600)
    torch.manual_seed(0)
    expected = [torch.randn(1000), torch.randn(3, 5).t(), torch.randn(50, 40).t()]
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=False))


def check_different_models_are_refused_on_every_rank_within_a_second(group: dist.ProcessGroup) -> None:
    last = group.size() - 1

    def refused(change: Any, *fragments: str, **options: Any) -> None:
        model = small_net()
        if group.rank() == last:
            model = change(model) or model
        dist.barrier(group)
        started = time.monotonic()
        with expect(ModelMismatchError, *fragments, f"rank {last}", f"seen from rank {group.rank()}"):
            DistributedDataParallel(model, process_group=group, **options)
        assert time.monotonic() - started < 1

    refused(
        lambda m: m.__setattr__("2", nn.Linear(40, 31)),
        "line 4",
        "parameter 2.weight: float32 [30, 40]",
        "parameter 2.weight: float32 [31, 40]",
    )
    refused(lambda m: nn.Sequential(m[0], m[1], m[3], m[2], m[4]), "parameter 2.weight", "parameter 3.weight")
    refused(lambda m: m[4].double() and None, "4.weight: float32", "4.weight: float64")
    refused(lambda m: m[0].requires_grad_(False) and None, "0.weight: float32 [40, 6], requires grad", "frozen")
    refused(lambda m: m[:4], "4.weight", "nothing more", "5 and 7 lines")
    refused(lambda m: m.register_buffer("count", torch.zeros(1)), "buffer count", "nothing more")
    refused(lambda m: m.requires_grad_(False) and None, "Sequential has no parameter that requires grad", "options:")
    refused(
        lambda m: m.__setattr__("extra", nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)),
        "parameter extra.weight",
    )
    different = {} if group.rank() == last else {"find_unused_parameters": True}
    refused(lambda m: None, "find_unused_parameters=True", "find_unused_parameters=False", **different)


def check_without_init_sync_nothing_is_exchanged_at_construction(group: dist.ProcessGroup) -> None:
    model = small_net(seed=group.rank())
    before = copy.deepcopy(model)
    if group.rank() == 0:
        time.sleep(0.2)
    DistributedDataParallel(model, process_group=group, init_sync=False)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


# ---- buffers


def check_buffers_follow_rank_0_before_each_forward_with_grad(group: dist.ProcessGroup) -> None:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
    ddp = DistributedDataParallel(model, process_group=group)
    mean = model[0].running_mean

    def differ() -> bool:
        everyone = [torch.empty_like(mean) for _ in range(group.size())]
        dist.all_gather(everyone, mean, group=group)
        return not all(torch.equal(everyone[0], other) for other in everyone)

    ddp(batch(group, 0))
    assert differ()  # each rank has counted its own batch
    ddp.eval()
    with torch.no_grad():
        ddp(batch(group, 1))
    assert differ()
    with ddp.no_sync():
        ddp(batch(group, 1))
    assert differ()
    ddp(batch(group, 1))
    assert not differ()
    model[0].running_mean = mean = torch.full((6,), float(group.rank()))  # replaced by the module
    ddp(batch(group, 1))
    assert mean.sum() == 0

    untouched = DistributedDataParallel(
        nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2)), process_group=group, broadcast_buffers=False
    )
    untouched.module[0].running_mean.fill_(group.rank())
    untouched.eval()(batch(group, 1))
    assert untouched.module[0].running_mean.sum() == 6 * group.rank()


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
        assert not ddp.reducer.sync_grad
    ddp.reducer.prepare_for_backward([])  # what Accelerate calls to exchange after all
    ddp.reducer.filter_unused_parameters(output)
    output["out"][0].sum().backward()
    assert_equal_on_all_ranks(model.trunk.weight.grad, group)
    assert ddp.reducer._rebuild_buckets() is False


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
    ddp = DistributedDataParallel(small_net(), process_group=group, bucket_cap_mb=KIB_IN_MIB)
    in_offered = {b.flat.data_ptr() for b in ddp.reducer.buckets} <= {tensor.data_ptr() for tensor in offered}
    assert in_offered == (dist.get_backend(group) == "photinus")
    ddp(batch(group)).sum().backward()
    assert_equal_on_all_ranks(next(ddp.parameters()).grad, group)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", checks_of(globals()))
def test_ddp(check: str, backend: str, world_size: int) -> None:
    assert_check(__name__, check, backend, world_size)
