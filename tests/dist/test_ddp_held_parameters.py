"""A parameter is averaged by one wrapper only, and those that come or go after wrapping are noticed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

from photinus.errors import PhotinusError, UnsuitableModelError
from photinus.parallel import DistributedDataParallel, wrap_model
from tests.dist.ddp_checks import assert_same_gradients, batch, expect, naive_twin, run_each_check, small_ddp, small_net
from tests.dist.naive import average_gradients

Wrap = Callable[[nn.Module], nn.Module]
HOLDS_BOTH = "wrap one module that holds both"
OUTER = "wrap the outer module"


def wrappers(group: dist.ProcessGroup) -> list[tuple[Wrap, Wrap]]:
    """Ours in ours, ours in torch's, torch's in ours."""

    def ours(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, process_group=group)

    def theirs(module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, process_group=group)

    return [(ours, ours), (ours, theirs), (theirs, ours)]


def tied() -> tuple[nn.Module, nn.Module]:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
    second.weight = first.weight
    return first, second


def check_tied_layers_that_are_wrapped_apart_are_refused(group: dist.ProcessGroup) -> None:
    for inner, outer in wrappers(group):
        first, second = tied()
        a, b = inner(first), outer(second)
        with expect(PhotinusError, "parameter weight of the", "of Linear belongs to", HOLDS_BOTH):
            b(a(batch(group))).sum().backward()


def check_a_backward_that_reaches_the_rest_of_a_wrapper_whose_parameter_another_took_is_refused(
    group: dist.ProcessGroup,
) -> None:
    first, second = tied()
    kept = DistributedDataParallel(first, process_group=group)
    b = DistributedDataParallel(second, process_group=group)
    with expect(PhotinusError, HOLDS_BOTH):
        b(kept.module(batch(group))).sum().backward()


def check_of_two_of_our_wrappers_the_outer_one_averages_for_both(group: dist.ProcessGroup) -> None:
    for whole in (False, True):
        net = small_net()
        twin = naive_twin(net, group)
        inner = DistributedDataParallel(net if whole else net[0], process_group=group)
        if not whole:
            net[0] = inner
        outer = DistributedDataParallel(inner if whole else net, process_group=group, static_graph=whole)
        for step in range(3):
            for model in (inner if whole and step == 1 else outer, twin):  # the inner one may be used alone
                model.zero_grad()
                model(batch(group, step)).square().mean().backward()
            average_gradients(twin, group)
            assert_same_gradients(net, twin, group)
        del outer, model
        gc.collect()
        with expect(PhotinusError, "belongs to", "the outer one did, and is gone: wrap the model again"):
            inner(batch(group))


def check_a_wrapper_in_a_wrapper_is_refused_where_one_is_torchs(group: dist.ProcessGroup) -> None:
    for inner, outer in wrappers(group)[1:]:
        for whole in (False, True):
            net = small_net()
            if not whole:
                net[0] = inner(net[0])
            with expect(UnsuitableModelError, "weight of the photinus", "(6 in all)" if whole else "(2 in all)", OUTER):
                outer(inner(net) if whole else net)(batch(group)).sum().backward()


def check_a_wrapper_in_a_wrapper_that_leaves_its_parameters_alone_is_right(group: dist.ProcessGroup) -> None:
    net = small_net()
    twin = naive_twin(net, group)
    net[0] = DistributedDataParallel(net[0], process_group=group)
    net._ddp_params_and_buffers_to_ignore = ["0.module.weight", "0.module.bias"]
    for model in (DistributedDataParallel(net, process_group=group), twin):
        model(batch(group)).square().mean().backward()
    average_gradients(twin, group)
    assert_same_gradients(net, twin, group)


def check_a_model_that_is_wrapped_again_is_right_whether_the_old_wrapper_is_kept_or_not(
    group: dist.ProcessGroup,
) -> None:
    for first, second in [*wrappers(group)[::2]]:
        for keep in (True, False):
            net = small_net()
            twin = naive_twin(net, group)
            old = first(net)
            ddp = second(net)
            if not keep:
                del old
            for step in range(3):
                for model in (ddp, twin):
                    model.zero_grad()
                    model(batch(group, step)).square().mean().backward()
                average_gradients(twin, group)
                assert_same_gradients(net, twin, group)
            if keep:
                with expect(PhotinusError, "use the one that was made last"):
                    old(batch(group))


def check_what_is_split_or_wrapped_already_is_refused_by_every_strategy(group: dist.ProcessGroup) -> None:
    if dist.get_backend(group) == "gloo":
        return
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        wrapped, split = small_net(), small_net()
        wrapped[0] = DistributedDataParallel(wrapped[0], process_group=group)
        fully_shard(split[0])
        refused = [(wrapped, OUTER)] if strategy in ("zero2", "zero3") else []  # the others wrap in a DDP of ours
        for net, text in (*refused, (split, "0.weight, 0.bias are split over the ranks already")):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            with expect(ValueError, text):
                wrap_model(net, [optimizer], strategy=strategy, device=torch.device("cpu"), process_group=group)
    first, second = (nn.Sequential(layer) for layer in tied())
    wrap_model(first, strategy="zero3", device=torch.device("cpu"), process_group=group)
    with expect(ValueError, "0.weight was split before, as 0.weight of Sequential", "Wrap one module that holds both"):
        wrap_model(second, strategy="zero3", device=torch.device("cpu"), process_group=group)


class LowRank(nn.Module):
    """A LoRA layer around a linear one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.ones(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def put_lora_in(net: nn.Sequential) -> None:
    net[2] = LowRank(net[2])


def assign(net: nn.Sequential) -> None:
    net.load_state_dict({name: p.clone() for name, p in net.state_dict().items()}, assign=True)


def append(net: nn.Sequential) -> None:
    net.append(nn.Linear(3, 3))


def remove(net: nn.Sequential) -> None:
    del net[4]


def set_one(net: nn.Sequential) -> None:
    net[0].bias = nn.Parameter(torch.zeros(40))


def check_parameters_that_come_or_go_after_wrapping_are_named(group: dist.ProcessGroup) -> None:
    for change, shown in (
        (put_lora_in, "2.down, 2.up (2 came)"),
        (assign, "0.weight, 0.bias, 2.weight, 2.bias, 4.weight (6 replaced"),
        (append, "5.weight, 5.bias (2 came)"),
        (remove, "4.weight, 4.bias (2 vanished)"),
        (set_one, "0.bias (1 replaced"),
    ):
        ddp = small_ddp(group)
        for step in range(2):
            ddp(batch(group, step)).sum().backward()
        change(ddp.module)
        with expect(
            UnsuitableModelError, f"rank {group.rank()}: the parameters of Sequential", shown, "Wrap after you"
        ):
            ddp(batch(group, 2)).sum().backward()


def check_changes_of_a_model_that_leave_its_parameters_are_no_error(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    twin = naive_twin(ddp.module, group)
    for net in (ddp.module, twin):
        prune.l1_unstructured(net[2], "weight", amount=0.5)  # the same parameter under another name
        net[1] = nn.Tanh()
        net[3] = nn.Sequential(nn.Linear(30, 30).requires_grad_(False), nn.ReLU())
        torch.manual_seed(0)
        nn.init.eye_(net[3][0].weight)
        nn.init.zeros_(net[3][0].bias)
    for _ in range(2):
        for net in (ddp, twin):
            net.zero_grad()
            net(batch(group)).square().mean().backward()
        average_gradients(twin, group)
        assert_same_gradients(ddp.module, twin, group)


def check_a_layer_that_came_frozen_is_named_once_it_is_not(group: dist.ProcessGroup) -> None:
    net = small_net()
    net[0].requires_grad_(False)
    ddp = DistributedDataParallel(net, process_group=group)
    for _ in range(2):
        net.append(nn.Linear(3, 3).requires_grad_(False))
        ddp(batch(group)).sum().backward()
    net[6].requires_grad_(True)
    with expect(UnsuitableModelError, "changed after it was wrapped: 6.weight, 6.bias (2 came)."):
        ddp(batch(group))
    del net[6]
    net[0].requires_grad_(True)
    with expect(ValueError, "0.weight was frozen when the model was wrapped and requires grad now"):
        ddp(batch(group))


def check_classes_without_a_hash_do_no_harm(group: dist.ProcessGroup) -> None:
    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            return cls is other

    kept = Meta("Kept", (), {})()
    kept.itself = kept
    small_ddp(group)(batch(group)).sum().backward()


def check_a_functional_call_of_a_wrapper_is_no_change(group: dist.ProcessGroup) -> None:
    ddp = small_ddp(group)
    twin = copy.deepcopy(ddp.module)
    fast = {name: p * 0.5 for name, p in ddp.named_parameters()}
    torch.func.functional_call(ddp, fast, (batch(group),)).sum().backward()
    torch.func.functional_call(twin, {n: p * 0.5 for n, p in twin.named_parameters()}, (batch(group),)).sum().backward()
    average_gradients(twin, group)
    assert_same_gradients(ddp.module, twin, group)


test_ddp_held_parameters = run_each_check(__name__)
