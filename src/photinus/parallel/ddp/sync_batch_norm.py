"""Batch normalisation over the whole global batch, on CPU and GPU, over plain torch.distributed.

Forward. Each rank computes count n, mean and M2 = Σ(x - mean)² of its part of the batch, per channel. One exchange
gives every rank those of all ranks, and each combines them in the order of the ranks (Chan, Golub & LeVeque,
"Algorithms for computing the sample variance", 1983):

    mean = Σ n_r mean_r / Σ n_r        M2 = Σ M2_r + Σ n_r (mean_r - mean)²

No term is a difference of large squares, as E[x²] - E[x]² would be. The output is then (x - mean) / √(M2/n + eps).

Backward. With x̂ = (x - mean) / √(var + eps), the derivative by x needs Σdy and Σdy·x̂ over the global batch, which
one exchange adds up. Derivatives by weight and bias stay sums over the rank's own part: DistributedDataParallel
averages them with all others.

The ranks may have different numbers of samples, none included; each sample counts once. What a rank computes to take
part, when a batch has fewer samples than ranks, does not count beside the samples of others (see `Part`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ...waiting_time import waiting_time


class Part:
    """This rank's part of the batch that it trains on. Loops and loaders set it for each batch.

    Attributes:
        is_counted: False if the batch has no sample for this rank, which then repeats others, with a weight of 0.
    """

    is_counted = True


class SyncBatchNorm(_BatchNorm):
    """Batch normalization that uses the statistics of the global batch in training.

    Input [N, C] or [N, C, ...]; output of the same shape and dtype. In evaluation, without a process group, or in a
    group of one, it computes exactly what torch's BatchNorm computes. Unlike `torch.nn.SyncBatchNorm` it works on CPUs.

    Args:
        num_features: number of channels, C.
        eps, momentum, affine, track_running_stats, device, dtype: as for `torch.nn.BatchNorm2d`.
        process_group: the ranks that share a batch. Default: the default group at the time of the forward.

    Raises (from forward):
        ValueError: the input has fewer than 2 dimensions, or the global batch has one value per channel in training.
    """

    process_group: dist.ProcessGroup | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm needs an input [N, C, ...] of at least 2 dimensions, got {list(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize `input`. In training, also update the running statistics, equally on all ranks."""
        self._check_input_dim(input)
        group = self._group()
        if not self.training or group is None:
            return super().forward(input)
        output, mean, variance, count = _SynchronisedBatchNorm.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, group, Part.is_counted
        )
        if count.device.type == "cpu" and count.item() <= 1:
            raise ValueError(
                f"expected more than 1 value per channel over all ranks in training, got {int(count.item())}"
            )
        if self.track_running_stats:
            self._update_running(mean, variance, count)
        return output  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["process_group"] = None  # a group cannot be pickled or copied; a copy uses the default group
        return state

    def _group(self) -> dist.ProcessGroup | None:
        """The ranks that share the batch, or None when there is no other."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        return group if group is not None and group.size() > 1 else None

    def _count_batch(self) -> float:
        """Counts a batch; returns the weight of its statistics: momentum, or 1/batches (the cumulative average)."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    @torch.no_grad()
    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        factor = self._count_batch()
        assert self.running_mean is not None
        assert self.running_var is not None
        unbiased = variance * (count / (count - 1).clamp(min=1.0))  # one value would make it NaN, on a GPU
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replace every BatchNorm in `module`, as `photinus.parallel.convert_sync_batchnorm` does."""
        return convert_sync_batchnorm(module, process_group)


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """A BatchNorm1d that `convert_sync_batchnorm` has converted: still one for scripts that look for those."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """A BatchNorm2d that `convert_sync_batchnorm` has converted: still one for scripts that look for those."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """A BatchNorm3d that `convert_sync_batchnorm` has converted: still one for scripts that look for those."""


_BECOMES = ((nn.BatchNorm1d, SyncBatchNorm1d), (nn.BatchNorm2d, SyncBatchNorm2d), (nn.BatchNorm3d, SyncBatchNorm3d))


def convert_sync_batchnorm(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Make every BatchNorm in `module` (torch's SyncBatchNorm too) one of ours, and return the module.

    The layers stay the same objects, with their parameters, buffers, hooks and settings. A BatchNorm2d is still one, so
    `isinstance(layer, nn.BatchNorm2d)`, with which scripts find the layers to freeze, still holds. A group that is
    given also applies to layers that are ours already.

    Raises:
        ValueError: a lazy batch norm is not initialized yet.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    for layer in layers:
        if not isinstance(layer, SyncBatchNorm) and any(map(is_lazy, [*layer.parameters(), *layer.buffers()])):
            raise ValueError(
                f"{type(layer).__name__} is not initialised yet. Run one forward on sample data before converting a "
                f"model."
            )
    for layer in layers:
        if not isinstance(layer, SyncBatchNorm):
            layer.__dict__.setdefault("process_group", None)  # torch's own has one
            layer.__class__ = next((ours for torchs, ours in _BECOMES if isinstance(layer, torchs)), SyncBatchNorm)
        if process_group is not None:
            layer.__dict__["process_group"] = process_group
    return module


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over the ranks, in place. Called in the same order on all of them."""
    # A compiler that traces this has no use for clocks.
    began = waiting_time.begin() if not torch.compiler.is_compiling() and waiting_time.on else 0
    dist.all_reduce(tensor, group=group)
    if began:
        waiting_time.end(began)
    return tensor


class _SynchronisedBatchNorm(torch.autograd.Function):
    """x [N, C, ...] -> normalised x, and mean [C], biased variance [C] and count [] of the global batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        is_counted: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        if not _is_channels_last(x):
            x = x.contiguous()
        count, mean, m2 = _local_statistics(x)
        # [ranks, 1 + 2C]. By all_reduce, where x + 0 is exact: every backend has it everywhere.
        rows = torch.zeros((group.size(), 1 + 2 * mean.numel()), dtype=mean.dtype, device=mean.device)
        rows[group.rank()] = torch.cat([count.view(1) if is_counted else -count.view(1), mean, m2])
        _sum(rows, group)
        signed, means, m2s = rows[:, :1], rows[:, 1 : 1 + mean.numel()], rows[:, 1 + mean.numel() :]
        # Negative counts are of ranks that repeat samples, which count where no rank of the group has others.
        counts = torch.where((signed > 0).any(), signed.clamp(min=0.0), -signed)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = ((m2s * (counts > 0)).sum(0) + (counts * (means - mean).square()).sum(0)) / total
        # Samples that do not count change no statistic: their share in the mean is 1/∞.
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), total if is_counted else total * math.inf)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, total)
        return _normalise(x, weight, bias, mean, variance, eps), mean, variance, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, invstd, total = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last) if _is_channels_last(x) else dy.contiguous()
        sum_dy, sum_dy_xhat = _local_gradient_sums(dy, x, mean, invstd)
        d_weight = sum_dy_xhat.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        d_bias = sum_dy.to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        sums = _sum(torch.stack([sum_dy, sum_dy_xhat]), ctx.group)  # also where dx is not needed: the others wait
        d_x = None
        if ctx.needs_input_grad[0]:
            # dx = w·invstd · (dy - Σdy/n - x̂·Σdy·x̂/n), x̂ = (x - mean)·invstd
            scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
            slope = -scale * invstd * sums[1] / total
            d_x = torch.sub(_wide(x), _channels(mean, x)).mul_(_channels(slope, x))
            d_x.addcmul_(_wide(dy) - _channels(sums[0] / total, x), _channels(scale, x))
            d_x = d_x.to(x.dtype)
        return d_x, d_weight, d_bias, None, None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype of its statistics: float32 for half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[C] so that it broadcasts over x [N, C, ...]."""
    return values.view(1, -1, *([1] * (x.dim() - 2)))


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _local_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count [], mean [C] and M2 [C] of this rank's part; zeros where it has no samples."""
    channels = x.shape[1]
    elems = x.numel() // channels if channels else 0
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    count = torch.full((), float(elems), dtype=wide, device=x.device)
    if elems == 0:
        zeros = torch.zeros(channels, dtype=wide, device=x.device)
        return count, zeros, zeros
    # Not torch.batch_norm_stats: for a constant channel its 1/√var is 0 on a GPU, from which no variance follows.
    # The GPU's kernel computes in float32 or wider, whatever the input.
    mean, variance = torch.batch_norm_update_stats(x if x.is_cuda else _wide(x), None, None, 0.0)
    return count, mean.to(wide), variance.to(wide) * elems


def _normalise(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """(x - mean)/√(variance + eps)·weight + bias, by the kernel that evaluation uses."""
    if x.numel() == 0:
        return torch.empty_like(x)
    weight = None if weight is None else weight.to(mean.dtype)
    bias = None if bias is None else bias.to(mean.dtype)
    return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)


def _local_gradient_sums(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σdy [C] and Σdy·x̂ [C] over this rank's part."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    # The derivative by weight is Σdy·x̂ and that by bias Σdy, for whatever mean and invstd the kernel is given.
    _, sum_dy_xhat, sum_dy = torch.ops.aten.native_batch_norm_backward(
        dy, x, torch.ones_like(mean), None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    return sum_dy, sum_dy_xhat
