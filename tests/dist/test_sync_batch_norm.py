"""SyncBatchNorm on several ranks: each rank's part of the batch, statistics of the whole.

The reference is torch's BatchNorm in the same process on the concatenated batch, from the same seed on every rank.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from photinus.parallel import SyncBatchNorm, convert_sync_batchnorm, wrap_model
from tests.dist.test_ddp import BACKENDS, assert_check, assert_equal_on_all_ranks, checks_of, expect

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def part_of(counts: list[int], rank: int) -> slice:
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def compare(
    group: dist.ProcessGroup,
    *,
    counts: list[int],
    shape: tuple[int, ...] = (4, 3, 3),
    dtype: torch.dtype = torch.float64,
    steps: int = 2,
    **options: Any,
) -> None:
    """Trains a layer for some steps on parts of `counts` samples each and compares everything with the whole."""
    torch.manual_seed(11)
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[len(shape)]
    whole = kind(shape[0], dtype=torch.float32 if dtype == torch.bfloat16 else dtype, **options)
    if whole.affine:
        nn.init.normal_(whole.weight)
        nn.init.normal_(whole.bias)
    layer = convert_sync_batchnorm(copy.deepcopy(whole), group)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    mine = part_of(counts, group.rank())
    for _ in range(steps):
        x = (torch.randn(sum(counts), *shape, dtype=torch.float64) * 2 + 5).to(dtype)
        dy = torch.randn(x.shape, dtype=torch.float64).to(dtype)
        x_whole, x_mine = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        y_whole, y_mine = whole(x_whole), layer(x_mine)
        y_whole.backward(dy)
        y_mine.backward(dy[mine])
        torch.testing.assert_close(y_mine, y_whole[mine], **tolerance)
        torch.testing.assert_close(x_mine.grad, x_whole.grad[mine], **tolerance)
    for (name, p), q in zip(layer.named_parameters(), whole.parameters(), strict=True):
        total = p.grad.clone()
        dist.all_reduce(total, group=group)
        torch.testing.assert_close(total, q.grad, msg=name, rtol=10 * TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
    for (name, buffer), expected in zip(layer.named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, msg=name, **tolerance)
        assert_equal_on_all_ranks(buffer, group)
    layer.eval()
    whole.eval()
    if whole.track_running_stats:
        x = torch.randn(sum(counts), *shape).to(dtype)
        torch.testing.assert_close(layer(x[mine]), whole(x)[mine], **tolerance)


def check_forward_backward_and_running_statistics_in_float64(group: dist.ProcessGroup) -> None:
    for shape in [(4,), (4, 6), (4, 3, 3), (2, 2, 3, 2)]:
        compare(group, counts=[3] * group.size(), shape=shape)


def check_forward_backward_and_running_statistics_in_float32_and_bfloat16(group: dist.ProcessGroup) -> None:
    compare(group, counts=[3] * group.size(), dtype=torch.float32)
    compare(group, counts=[8] * group.size(), dtype=torch.bfloat16)


def check_ranks_may_have_different_numbers_of_samples(group: dist.ProcessGroup) -> None:
    compare(group, counts=[1, 5, 2, 3][: group.size()])
    compare(group, counts=[1, 1, 1, 1][: group.size()], shape=(4,))


def check_a_rank_without_samples_takes_part(group: dist.ProcessGroup) -> None:
    compare(group, counts=[3, 0, 4, 2][: group.size()])
    compare(group, counts=[0, 3, 4, 0][: group.size()])


def check_settings_of_the_layer(group: dist.ProcessGroup) -> None:
    counts = [2, 3, 1, 2][: group.size()]
    compare(group, counts=counts, momentum=None, steps=3)
    compare(group, counts=counts, momentum=0.7, eps=0.1)
    compare(group, counts=counts, affine=False)
    compare(group, counts=counts, track_running_stats=False)


def check_channels_last_input_gives_the_same_and_keeps_its_layout(group: dist.ProcessGroup) -> None:
    torch.manual_seed(group.rank())
    layer = SyncBatchNorm(3, process_group=group)
    x = torch.randn(2, 3, 4, 5)
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        leaf = x.clone().contiguous(memory_format=memory_format).requires_grad_()
        y = layer(leaf)
        assert y.is_contiguous(memory_format=memory_format)
        y.square().mul(torch.arange(5.0)).sum().backward()
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1])


def check_evaluation_is_local(group: dist.ProcessGroup) -> None:
    layer = SyncBatchNorm(3, process_group=group).eval()
    without = SyncBatchNorm(3, process_group=group, track_running_stats=False).eval()
    if group.rank() == 0:  # the others take no part
        x = torch.randn(4, 3)
        torch.testing.assert_close(layer(x), x / (1 + 1e-5) ** 0.5)
        torch.testing.assert_close(without(x), nn.functional.batch_norm(x, None, None, training=True))


def check_one_value_per_channel_over_all_ranks_is_refused(group: dist.ProcessGroup) -> None:
    layer = SyncBatchNorm(3, process_group=group)
    with expect(ValueError, "more than 1 value per channel over all ranks", "got 1"):
        layer(torch.randn(1 if group.rank() == 0 else 0, 3))
    assert layer.num_batches_tracked == 0


def check_frozen_inputs_and_frozen_weights(group: dist.ProcessGroup) -> None:
    """A rank that needs no derivative by x still takes part in the exchange of backward."""
    layer = SyncBatchNorm(3, process_group=group)
    x = torch.randn(4, 3, requires_grad=group.rank() == 0)
    layer(x).square().sum().backward()
    assert (x.grad is not None) == (group.rank() == 0)
    layer.requires_grad_(False)
    x = torch.randn(4, 3, requires_grad=True)
    layer(x).pow(3).sum().backward()
    assert x.grad is not None


def check_a_wrapped_network_trains_as_one_process_on_the_whole_batch(group: dist.ProcessGroup) -> None:
    """Under our DDP and torch's, on the CPU, at which torch's own SyncBatchNorm is refused."""
    for strategy in ("ddp", "torch-ddp"):
        torch.manual_seed(12)
        whole = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
        model = wrap_model(
            copy.deepcopy(whole),
            strategy=strategy,
            sync_batch_norm=True,
            device=torch.device("cpu"),
            process_group=group,
        )
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (whole, model)]
        for _ in range(4):
            x = torch.randn(4 * group.size(), 1, 6, 6, dtype=torch.float64)
            y = torch.randint(3, (4 * group.size(),))
            mine = part_of([4] * group.size(), group.rank())
            for net, inputs, targets, optimizer in (
                (whole, x, y, optimizers[0]),
                (model, x[mine], y[mine], optimizers[1]),
            ):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
        for (name, a), b in zip(whole.state_dict().items(), model.module.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


def check_unused_parameters_beside_synchronised_statistics(group: dist.ProcessGroup) -> None:
    """Ranks that use different branches keep statistics and gradients apart on one group.

    A branch that this rank does not use would be sent before the statistics, on the rank that uses it after them.
    """

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(13)
            self.norm = nn.BatchNorm1d(8)
            self.branches = nn.ModuleList([nn.Linear(3, 8) for _ in range(2)])
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
            return self.head(self.norm(self.branches[branch](x)))

    model = wrap_model(
        Branches(),
        strategy="ddp",
        sync_batch_norm=True,
        device=torch.device("cpu"),
        process_group=group,
        find_unused_parameters=True,
        bucket_cap_mb=1e-4,
    )
    for step in range(2):
        model.zero_grad()
        model(torch.randn(4, 3), (group.rank() + step) % 2).square().sum().backward()
        for parameter in model.parameters():
            assert_equal_on_all_ranks(parameter.grad, group)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", checks_of(globals()))
def test_sync_batch_norm(check: str, backend: str, world_size: int) -> None:
    assert_check(__name__, check, backend, world_size)
