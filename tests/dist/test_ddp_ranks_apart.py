"""Ranks that go another way than the others: out of step, or with other weights. And those that may differ."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

from photinus.errors import MismatchError, ModelMismatchError
from photinus.parallel import DistributedDataParallel
from photinus.parallel.exchange.verify_models import compare_parameters
from photinus.parallel.reducer import checks
from tests.dist.ddp_checks import (
    KIB_IN_MIB,
    SharedFrozenMixed,
    assert_equal_on_all_ranks,
    batch,
    expect,
    run_each_check,
    small_ddp,
    small_net,
)
from tests.ranks import run_ranks

LAST_STEP = 70  # at which what was wrong before has been found


def train(ddp: nn.Module, group: dist.ProcessGroup, optimizer: Any, steps: int, before: Any = None) -> None:
    """Steps, and what is to be done `before(step)` each."""
    for step in range(steps):
        if before is not None:
            before(step)
        optimizer.zero_grad()
        ddp(batch(group, step)).square().mean().backward()
        optimizer.step()


# ---- out of step


def expect_out_of_step(
    group: dist.ProcessGroup, at_once: int, at_a_comparison: int, kind: type[Exception] = MismatchError
) -> Any:
    """The error: over photinus with rank 1's steps since the exchange before, else with all up to a comparison."""
    if dist.get_backend(group) == "photinus":
        return expect(kind, "are out of step", f"rank 1 made {at_once} optimizer step")
    return expect(MismatchError, "are out of step", f"rank 1: {at_a_comparison} optimizer steps", "65 optimizer steps")


def exchanges_before_it_is_found(group: dist.ProcessGroup, at_once: int) -> int:
    return at_once if dist.get_backend(group) == "photinus" else 65


def check_no_sync_on_one_rank_only_is_found(group: dist.ProcessGroup) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        {"hook": default_hooks.allreduce_hook},
    ]
    for each in options:
        hook = each.pop("hook", None)
        ddp, exchanges = small_ddp(group, **each), 0
        if hook is not None:
            ddp.register_comm_hook(group, hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        kind = MismatchError if hook is None else RuntimeError  # of the future that torch's hook chains
        with expect_out_of_step(group, 2, 66, kind):
            for step in range(70):
                ddp.require_backward_grad_sync = not (group.rank() == 1 and step == 2)
                ddp(batch(group, step)).mean().backward()
                exchanges += ddp.require_backward_grad_sync
                optimizer.step()
        assert exchanges == exchanges_before_it_is_found(group, 2)  # the third is the first that is wrong


def check_an_extra_forward_and_backward_on_one_rank_is_found(group: dist.ProcessGroup) -> None:
    ddp, exchanges = small_ddp(group), 0
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with expect_out_of_step(group, 0, 64):
        for step in range(70):
            for _ in range(2 if group.rank() == 1 and step == 3 else 1):
                ddp(batch(group, step)).mean().backward()
                exchanges += 1
            optimizer.step()
    assert exchanges == exchanges_before_it_is_found(group, 4)


def check_an_optimizer_step_left_out_on_one_rank_is_found(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    optimizer = torch.optim.Adam(ddp.parameters())
    with expect_out_of_step(group, 0, 64):
        for step in range(70):
            ddp(batch(group, step)).sum().backward()
            if group.rank() != 1 or step != 2:
                optimizer.step()


def check_gradients_of_the_step_before_on_one_rank_are_found(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with expect(MismatchError, "such steps=[] on rank 0, [5] on rank 1", "optimizer.zero_grad()"):
        for step in range(70):
            ddp(batch(group, step)).mean().backward()
            optimizer.step()
            if group.rank() != 1 or step != 3:
                optimizer.zero_grad()


# ---- other weights


def check_another_learning_rate_is_found_after_the_first_step(group: dist.ProcessGroup) -> None:
    ddp, done = small_ddp(group), []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1 if group.rank() == 1 else 0.2)
    both, odd_one = "rank 0 and rank 1 have different values", "rank 1 has other values than ranks 0, 2"
    who = both if group.size() == 2 else odd_one  # of two, nobody can say which is wrong
    with expect(ModelMismatchError, f"{who} in parameter 0.weight [40, 6] (and 5 more"):
        train(ddp, group, optimizer, 5, done.append)
    assert done == [0, 1]


def check_another_optimizer_is_found(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group, find_unused_parameters=True)
    kind = torch.optim.Adam if group.rank() == 1 else torch.optim.SGD
    with expect(ModelMismatchError, "parameter 0.weight"):
        train(ddp, group, kind(ddp.parameters(), lr=0.01), 5)


class Norm(nn.Module):
    """Parameters that are large, permuted, of an odd number of bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Parameter(torch.randn(300, 600))
        self.permuted = nn.Parameter(torch.randn(3, 4, 5, dtype=torch.bfloat16).permute(1, 2, 0))
        self.odd = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() * sum(p.float().square().mean() for p in self.parameters())


def check_one_element_that_was_changed_once_is_found(group: dist.ProcessGroup) -> None:
    for name, place in (("large", (250, 1)), ("permuted", (3, 4, 2)), ("odd", (6,))):
        ddp = DistributedDataParallel(Norm(), process_group=group)
        changed = getattr(ddp.module, name)

        def change(step: int, changed: nn.Parameter = changed, place: tuple[int, ...] = place) -> None:
            if step == 3 and group.rank() == 1:
                changed.data[place] += 1

        with expect(ModelMismatchError, f"parameter {name}"):
            train(ddp, group, torch.optim.SGD(ddp.parameters(), lr=1e-3), LAST_STEP, change)


def check_weights_are_compared_where_buckets_may_be_skipped_and_not_under_hooks(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group, find_unused_parameters=True, skip_all_reduce_unused_params=True)
    with expect(ModelMismatchError, "parameter 0.weight"):
        train(ddp, group, torch.optim.SGD(ddp.parameters(), lr=0.01 + 0.01 * group.rank()), 3)
    hooked = small_ddp(group)  # whose hook lets weights go apart
    hooked.register_comm_hook(None, debugging_hooks.noop_hook)
    train(hooked, group, torch.optim.SGD(hooked.parameters(), lr=0.01), LAST_STEP)


def check_all_parameters_can_be_compared_at_any_time(group: dist.ProcessGroup) -> None:
    model = SharedFrozenMixed()
    named = list(model.named_parameters())
    compare_parameters(named, group)
    if group.rank() == 1:
        model.factors.data[3] += 1
        model.strided.data[1, 1] += 1
    with expect(ModelMismatchError, "in parameter factors [4]", "1 more of"):
        compare_parameters(named, group)


# ---- no false alarms


def compared_often(check: Callable[[dist.ProcessGroup], None]) -> Callable[[dist.ProcessGroup], None]:
    """The check, with facts that are compared at every second exchange."""

    @functools.wraps(check)
    def run(group: dist.ProcessGroup) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checks, "_EXCHANGES_PER_FACTS", 2)
            check(group)

    return run


@compared_often
def check_other_numbers_of_micro_batches_are_fine(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(6):
        for _ in range((group.rank() + step) % 3):
            with ddp.no_sync():
                ddp(batch(group, step)).mean().backward()
            probe = nn.Linear(2, 2)  # another model, of this rank alone, trained between two of them
            probe(torch.ones(2)).sum().backward()
            torch.optim.SGD(probe.parameters(), lr=1.0).step()
        ddp(batch(group, step)).mean().backward()
        optimizer.step()
    assert_equal_on_all_ranks(ddp.module[0].weight, group)


@compared_often
def check_join_and_what_follows_it_is_fine(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for divide in (True, False):
        with ddp.join(divide_by_initial_world_size=divide):
            train(ddp, group, optimizer, 3 + 4 * group.rank())
        train(ddp, group, optimizer, 6)
    assert_equal_on_all_ranks(ddp.module[0].weight, group)


@compared_often
def check_two_models_with_optimizers_of_their_own_are_fine(group: dist.ProcessGroup) -> None:
    """As of a GAN: the second one's gradients pass through the first one, too."""
    torch.manual_seed(0)
    first, second = small_ddp(group), DistributedDataParallel(nn.Linear(3, 6), process_group=group)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (first, second)]
    for step in range(6):
        first(batch(group, step)).square().mean().backward()
        first(second(batch(group, step)[:, :3]).detach()).mean().backward()
        optimizers[0].step()
        first(second(batch(group, step)[:, :3])).mean().backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@compared_often
def check_weights_changed_for_a_while_are_fine(group: dist.ProcessGroup) -> None:
    """SAM: each rank climbs by its own gradient, takes the averaged one there, and steps from where it was."""
    ddp = small_ddp(group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(8):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(batch(group, step)).square().mean().backward()
        before = [p.detach().clone() for p in ddp.parameters()]
        for p in ddp.parameters():
            p.data = p.data + 0.01 * p.grad
        optimizer.zero_grad()
        ddp(batch(group, step)).square().mean().backward()
        for p, old in zip(ddp.parameters(), before, strict=True):
            p.data = old
        optimizer.step()
    assert_equal_on_all_ranks(ddp.module[0].weight, group)


@compared_often
def check_optimizers_of_parts_zero_and_checkpointing_are_fine(group: dist.ProcessGroup) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net[2:](checkpoint(self.net[:2], x.requires_grad_(), use_reentrant=True))

    def parts(parameters: list[nn.Parameter]) -> list[Any]:
        return [torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.Adam(parameters[2:], lr=0.01)]

    def zero(parameters: list[nn.Parameter]) -> list[Any]:
        return [ZeroRedundancyOptimizer(parameters, torch.optim.Adam, process_group=group, lr=0.01)]

    def parts_on_one_rank(parameters: list[nn.Parameter]) -> list[Any]:
        cuts = [parameters[:2], parameters[2:]] if group.rank() == 0 else [parameters]
        return [torch.optim.SGD(part, lr=0.1) for part in cuts]

    makers: list[Callable[[list[nn.Parameter]], list[Any]]] = [parts, parts_on_one_rank, zero]
    for make in makers:
        ddp = DistributedDataParallel(Checkpointed(), process_group=group, bucket_cap_mb=KIB_IN_MIB)
        optimizers = make(list(ddp.parameters()))
        for step in range(8):
            ddp(batch(group, step)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_equal_on_all_ranks(ddp.module.net[0].weight, group)


@compared_often
def check_steps_that_a_scaler_skips_are_fine(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(8):
        optimizer.zero_grad()
        loss = ddp(batch(group, step)).square().mean()
        if step in (2, 5) and group.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_equal_on_all_ranks(ddp.module[0].weight, group)


@compared_often
def check_weights_may_differ_where_it_was_asked_for(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group, check_ranks=False)
    train(ddp, group, torch.optim.SGD(ddp.parameters(), lr=0.1 + group.rank()), 6)
    ignored = small_net()
    ignored._ddp_params_and_buffers_to_ignore = ["0.weight"]
    ddp = DistributedDataParallel(ignored, process_group=group)
    twin = copy.deepcopy(ignored)
    train(ddp, group, torch.optim.SGD(ddp.parameters(), lr=0.1), 6)
    assert not torch.equal(ignored[0].weight, twin[0].weight)


@compared_often
def check_a_forward_of_one_rank_alone_is_fine(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(6):
        if group.rank() == 0 and step > 1:
            ddp(batch(group, step))  # a look at the outputs, with grad enabled
        ddp(batch(group, step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


test_ddp_ranks_apart = run_each_check(__name__)


def test_buffers_that_differ_in_size_and_travel_in_as_many_bytes_are_an_error_and_stay_as_they_are() -> None:
    run_ranks(f"{__name__}:_buffers_of_other_sizes", world_size=2, backend="photinus")


def _buffers_of_other_sizes(rank: int, world_size: int) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(3))
    ddp = DistributedDataParallel(model)
    model.seen = own = torch.full((3 + rank,), rank + 5.0)
    with expect(MismatchError, "float32[3]", "float32[4]"):
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()
    assert torch.equal(own, torch.full((3 + rank,), rank + 5.0))
