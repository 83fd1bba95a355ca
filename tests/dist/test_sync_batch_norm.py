"""SyncBatchNorm on several ranks: each rank's part of the batch, statistics of the whole.

The reference is torch's BatchNorm in the same process on the concatenated batch, from the same seed on every rank.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from photinus.parallel import DistributedDataParallel, SyncBatchNorm, convert_sync_batchnorm, wrap_model
from photinus.parallel.ddp.sync_batch_norm import Part
from tests.dist.ddp_checks import assert_equal_on_all_ranks, expect, run_each_check

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def part_of(counts: list[int], rank: int) -> slice:
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def by_statistics(x: torch.Tensor, state: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    """What a layer with this state makes of x [N, C] in evaluation."""
    mean, variance = state[prefix + "running_mean"], state[prefix + "running_var"]
    return (x - mean) / (variance + 1e-5).sqrt() * state[prefix + "weight"] + state[prefix + "bias"]


def compare(
    group: dist.ProcessGroup,
    *,
    counts: list[int],
    shape: tuple[int, ...] = (4, 3, 3),
    dtype: torch.dtype = torch.float64,
    steps: int = 2,
    repeats: bool = False,
    **options: Any,
) -> None:
    """Trains a layer for some steps on parts of `counts` samples each and compares everything with the whole.

    `repeats`: a rank without samples computes the whole batch, with a weight of 0, as the loaders have it.
    """
    torch.manual_seed(11)
    kind = {1: nn.BatchNorm1d, 2: nn.BatchNorm1d, 3: nn.BatchNorm2d, 4: nn.BatchNorm3d}[len(shape)]
    whole = kind(shape[0], dtype=torch.float32 if dtype.itemsize == 2 else dtype, **options)
    if whole.affine:
        nn.init.normal_(whole.weight)
        nn.init.normal_(whole.bias)
    layer = convert_sync_batchnorm(copy.deepcopy(whole), group)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    repeats = repeats and not counts[group.rank()]
    mine, weight = (slice(None), 0.0) if repeats else (part_of(counts, group.rank()), 1.0)
    Part.is_counted = not repeats
    for _ in range(steps):
        x = (torch.randn(sum(counts), *shape, dtype=torch.float64) * 2 + 5).to(dtype)
        dy = torch.randn(x.shape, dtype=torch.float64).to(dtype)
        x_whole, x_mine = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        y_whole, y_mine = whole(x_whole), layer(x_mine)
        y_whole.backward(dy)
        y_mine.backward(dy[mine] * weight)
        torch.testing.assert_close(y_mine, y_whole[mine], **tolerance)
        torch.testing.assert_close(x_mine.grad, x_whole.grad[mine] * weight, **tolerance)
    Part.is_counted = True
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


def check_forward_backward_and_running_statistics_in_float32_and_half_precision(group: dist.ProcessGroup) -> None:
    compare(group, counts=[3] * group.size(), dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        compare(group, counts=[8] * group.size(), dtype=dtype)
        compare(group, counts=[5, 0, 4][: group.size()], dtype=dtype)


def check_ranks_may_have_different_numbers_of_samples(group: dist.ProcessGroup) -> None:
    compare(group, counts=[1, 5, 2, 3][: group.size()])
    compare(group, counts=[1, 1, 1, 1][: group.size()], shape=(4,))


def check_a_rank_without_samples_takes_part(group: dist.ProcessGroup) -> None:
    compare(group, counts=[3, 0, 4, 2][: group.size()])
    compare(group, counts=[0, 3, 4, 0][: group.size()])


def check_samples_that_a_rank_repeats_do_not_count(group: dist.ProcessGroup) -> None:
    compare(group, counts=[2, 0, 1, 0][: group.size()], shape=(4,), repeats=True)
    compare(group, counts=[0, 1, 0, 0][: group.size()], repeats=True)
    # Of a global batch that has no sample for any rank of this group, all its ranks repeat some.
    layer, x = SyncBatchNorm(4, process_group=group), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    Part.is_counted = False
    y = layer(x)
    Part.is_counted = True
    torch.testing.assert_close(y, nn.BatchNorm1d(4)(x))


def check_settings_of_the_layer(group: dist.ProcessGroup) -> None:
    counts = [2, 3, 1, 2][: group.size()]
    compare(group, counts=counts, momentum=None, steps=3)
    compare(group, counts=counts, momentum=0.7, eps=0.1)
    compare(group, counts=counts, affine=False)
    compare(group, counts=counts, track_running_stats=False)


def check_a_layer_of_half_precision_counts_and_averages_in_float32(group: dist.ProcessGroup) -> None:
    """2,048 samples of 1: their number and their sum are beyond what bfloat16 counts one by one (256)."""
    layer = SyncBatchNorm(2, process_group=group, dtype=torch.bfloat16, momentum=None)
    x = torch.ones(2048, 2, dtype=torch.bfloat16)
    x[:, 1] = torch.arange(2048) % 2
    y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(layer.running_mean, torch.tensor([1.0, 0.5], dtype=torch.bfloat16), rtol=0, atol=0)
    torch.testing.assert_close(layer.running_var, torch.tensor([0.0, 0.25], dtype=torch.bfloat16), rtol=0, atol=0)
    torch.testing.assert_close(y[:2, 1], torch.tensor([-1.0, 1.0], dtype=torch.bfloat16), rtol=0, atol=1e-2)


def check_evaluation_after_conversion_of_torchs_class(group: dist.ProcessGroup) -> None:
    """torch's SyncBatchNorm becomes ours, trains on the CPU, and evaluates with what it has learned."""
    torch.manual_seed(14)
    theirs = nn.Sequential(nn.SyncBatchNorm(3, process_group=group), nn.BatchNorm1d(3))
    names = list(theirs.state_dict())
    ours = convert_sync_batchnorm(theirs)
    assert all(isinstance(layer, SyncBatchNorm) for layer in ours)
    assert ours[0].process_group is group
    ours(torch.randn(4 + group.rank(), 3) + group.rank()).square().sum().backward()
    learned = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    assert learned["0.running_mean"].abs().min() > 0
    assert list(ours.state_dict()) == names
    ours.eval()
    if group.rank() == 0:  # in evaluation nothing is exchanged
        x = torch.randn(5, 3)
        expected = by_statistics(by_statistics(x, learned, "0."), learned, "1.")
        torch.testing.assert_close(ours(x), expected)


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


class Blocks(nn.Module):
    """Two normalised blocks; `checkpointed` forgets their activations and computes them anew in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(15)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 6), nn.BatchNorm1d(6), nn.Tanh()) for width in (3, 6)
        ).double()
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.pow(3).mean()


def compare_accumulated(
    group: dist.ProcessGroup, *, checkpointed: bool, counts: list[int] | None = None, **options: Any
) -> None:
    """Gradients of two batches, the first under no_sync, against one process on the whole batches."""
    whole = Blocks()
    model = copy.deepcopy(whole)
    model.checkpointed = whole.checkpointed = checkpointed
    model = DistributedDataParallel(convert_sync_batchnorm(model, group), process_group=group, **options)
    counts = counts or [4] * group.size()
    mine = part_of(counts, group.rank())
    for step in range(2):
        x = torch.randn(sum(counts), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        whole(x).backward()
        share = counts[group.rank()] * group.size() / sum(counts)  # DDP averages over ranks, not over samples
        with model.no_sync() if step == 0 else nullcontext():
            (model(x[mine]) * share).backward()
    for (name, p), q in zip(model.module.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=name)
    for (name, buffer), expected in zip(model.module.named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-12, atol=1e-12, msg=name)


def check_accumulated_gradients_are_those_of_one_process(group: dist.ProcessGroup) -> None:
    compare_accumulated(group, checkpointed=False)
    compare_accumulated(group, checkpointed=False, counts=[1, 6, 3][: group.size()], gradient_as_bucket_view=True)


def check_activation_checkpointing_gives_the_same_gradients(group: dist.ProcessGroup) -> None:
    """The statistics are exchanged anew in backward, between the exchanges of gradients."""
    compare_accumulated(group, checkpointed=True, bucket_cap_mb=1e-4)
    compare_accumulated(group, checkpointed=True, counts=[2, 5, 1][: group.size()])


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


test_sync_batch_norm = run_each_check(__name__)
