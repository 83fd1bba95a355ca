"""The loss of each step, brought together over the ranks.

A step's loss is the mean over the *global* batch. To know it costs an exchange between the ranks, so a few steps are
collected and exchanged at once. The files that hold the numbers are those of `photinus.runlog.tables`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...runlog.tables import StepLoss

__all__ = ["StepLosses"]


class StepLosses:
    """Collects this rank's losses and exchanges them a few steps at a time.

    The collected tensors stay on their device: nothing waits for the device until `exchange`.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, int, int, int]] = []  # step, epoch, local samples, global samples
        self._given: list[torch.Tensor | None] = []  # this rank's mean loss, None where none was given

    def __len__(self) -> int:
        return len(self._steps)

    def begin_step(self, step: int, epoch: int, samples: int, global_samples: int) -> None:
        """Opens the slot of a step, of which this rank has `samples` of `global_samples`."""
        self._steps.append((step, epoch, samples, global_samples))
        self._given.append(None)

    def add(self, loss: torch.Tensor) -> None:
        """Adds a loss (scalar, mean over this rank's samples) to the step begun last."""
        loss = loss.detach().float().reshape(())
        before = self._given[-1]
        self._given[-1] = loss if before is None else before + loss

    def drop_last(self) -> None:
        """Forgets the step begun last: its body did not finish."""
        del self._steps[-1:], self._given[-1:]

    def exchange(
        self, flags: Sequence[float], world_size: int, device: torch.device
    ) -> tuple[list[StepLoss], list[float]]:
        """The losses of the collected steps over all ranks, and the sums of the flags. Every rank must call it.

        One all-reduce of 2 * steps + len(flags) float64 values. Steps for which no rank gave a loss are left out.
        """
        # Stacked where they are, then one copy to the host.
        given = [loss for loss in self._given if loss is not None]
        means = iter(torch.stack(given).tolist() if given else [])
        sums, counts = [], []
        for loss, (_, _, samples, _) in zip(self._given, self._steps, strict=True):
            mean = 0.0 if loss is None else next(means)
            # Of no samples the mean is nan, and must count as nothing.
            sums.append(mean * samples if samples else 0.0)
            counts.append(0 if loss is None else samples)
        vector = [*sums, *counts, *flags]
        if world_size > 1 and vector:
            # On the host for backends of the host, on the device for nccl, which knows no other.
            tensor = torch.tensor(vector, dtype=torch.float64, device=device)
            dist.all_reduce(tensor)
            vector = tensor.tolist()
        n = len(self._steps)
        losses = [
            StepLoss(step, epoch, total / count, global_samples)
            for (step, epoch, _, global_samples), total, count in zip(
                self._steps, vector[:n], vector[n : 2 * n], strict=True
            )
            if count
        ]
        self._steps, self._given = [], []
        return losses, vector[2 * n :]
