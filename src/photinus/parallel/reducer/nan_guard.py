"""Which rank made the first gradient that is not a finite number?

When a bucket is complete and hot in the cache, its elements are added up: a NaN or an infinity shows in the sum. What
a rank found travels with the last bucket, so in the usual case, that all is finite, the guard costs one read of the
gradients and no exchange of its own. Only when some rank found something do the ranks tell each other what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...errors import NonFiniteGradientError
from ..exchange.collectives import Average
from .gradient_memory import Bucket, Slot

FOUND = -1.0
"""What a rank that found something leaves in its element of the last bucket. (1 says that its backward failed.)"""


class NanGuard:
    """Looks at the gradients of each round before they are averaged."""

    def __init__(self, average: Average) -> None:
        self._average = average
        self._found: Slot | None = None

    def watch(self, bucket: Bucket, status: torch.Tensor | None) -> None:
        """Looks at a bucket that is about to be launched.

        Args:
            bucket: its gradients are this rank's own.
            status: the ranks' elements of the bucket, if it is the last one and has them.
        """
        if self._found is None and (bucket.payload.is_floating_point() or bucket.payload.is_complex()):
            self._found = _first_not_finite(bucket)
        if self._found is not None and status is not None and status[self._average.group.rank()] == 0:
            status[self._average.group.rank()] = FOUND

    def watch_sparse(self, slots: Sequence[Slot]) -> None:
        """Looks at this rank's own sparse gradients, which travel when all buckets have left."""
        for slot in slots:
            gradient = slot.parameter.grad
            if self._found is None and gradient is not None:
                values = gradient._values() if gradient.is_sparse else gradient
                if not bool(torch.isfinite(values).all()):
                    self._found = slot

    def check(self, slots: Sequence[Slot], status: torch.Tensor | None) -> None:
        """Ends a round. Every rank calls it, ranks without input too.

        Args:
            slots: all parameters.
            status: the ranks' elements after the exchange; None where they did not travel, or do not tell all.

        Raises:
            NonFiniteGradientError: on every rank, when one rank found something.
        """
        found, self._found = self._found, None
        # An averaged status that is not a number: the exchange itself overflowed or was given garbage.
        if status is not None and bool(((status >= 0) & torch.isfinite(status)).all()):
            return
        device = slots[0].parameter.device
        mine = torch.tensor([-1 if found is None else found.index], dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(self._average.world_size)]
        dist.all_gather(everyone, mine, group=self._average.group)
        for rank, index in enumerate(int(each.item()) for each in everyone):
            if index >= 0:
                raise NonFiniteGradientError(
                    f"rank {rank} made a gradient that is not finite: parameter {slots[index].name} "
                    f"{list(slots[index].parameter.shape)} (the first one in the order of backward; others may follow "
                    f"from it). Seen from rank {self._average.group.rank()}, before the optimizer's step: the "
                    f"parameters are still good. Look at that rank's batch, lower the learning rate or scale, or clip."
                )


def _first_not_finite(bucket: Bucket) -> Slot | None:
    # Half precision is added up in float32, which its sum cannot leave.
    dtype = torch.float32 if bucket.payload.dtype.itemsize < 4 else None
    total = bucket.payload.sum(dtype=dtype).abs().item()
    if math.isfinite(total):
        return None
    for slot in bucket.slots:
        if slot.view is not None and not bool(torch.isfinite(slot.view).all()):
            return slot
    return None  # finite elements whose sum is not
