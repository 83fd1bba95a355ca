"""Makes a reducer's buckets: which gradients lie together, and what travels with them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..exchange.collectives import Average, allocate
from .buckets import ALIGNMENT_BYTES, BucketPlan, ParameterSpec, assign_buckets
from .gradient_memory import Bucket, Slot
from .options import ReducerOptions
from .rank_facts import ELEMS_PER_RANK


class BucketMaker:
    """Makes buckets for some parameters, in the group's memory where it offers some.

    Attributes:
        order: indices of parameters in the order in which gradients are expected; None: reverse registration order.
    """

    def __init__(self, slots: Sequence[Slot], average: Average, options: ReducerOptions, device: torch.device) -> None:
        self._slots = slots
        self._average = average
        self._options = options
        self._device = device
        self.order: list[int] | None = None

    def agree_on_order(self, seen: Sequence[int]) -> None:
        """Takes the order in which rank 0 saw gradients; every rank calls it.

        Args:
            seen: indices of parameters; where one comes twice, the first counts.
        """
        self.order = list(dict.fromkeys(seen))
        if self._average.world_size > 1:
            agreed = torch.tensor(self.order, dtype=torch.int64, device=self._device)
            dist.broadcast(agreed, group=self._average.group, group_src=0)
            self.order = agreed.tolist()

    def plans(self, *, padded: bool) -> list[BucketPlan]:
        """The layout in the present order; its indices are those of `slots`. Without padding for hooks."""
        position = {slot.index: i for i, slot in enumerate(self._slots)}
        return assign_buckets(
            [ParameterSpec(slot.name, slot.parameter.numel(), slot.parameter.dtype) for slot in self._slots],
            cap_bytes=self._options.bucket_cap_bytes,
            first_cap_bytes=self._options.first_bucket_bytes,
            caps_bytes=self._options.caps_bytes,
            order=None if self.order is None else [position[i] for i in self.order if i in position],
            last=frozenset(i for i, slot in enumerate(self._slots) if slot.name in self._options.last),
            alignment_bytes=ALIGNMENT_BYTES if padded else 1,
        )

    def make(self, *, carries_tail: bool) -> list[Bucket]:
        """Buckets in the order in which they are launched.

        Args:
            carries_tail: whether what lies behind the gradients is averaged with them. If not, a bucket holds gradients
                and nothing else: what compresses it must not meet padding.
        """
        buckets: list[Bucket] = []
        plans = self.plans(padded=carries_tail)
        for number, plan in enumerate(plans):
            # The last bucket carries what the ranks say of themselves, so that all fail together, at no extra exchange.
            # On a GPU reading it would make the host wait for the device.
            carries_facts = (
                number == len(plans) - 1
                and self._device.type == "cpu"
                and not self._options.skip_unused
                and carries_tail
            )
            tail = ELEMS_PER_RANK * self._average.world_size if carries_facts else 0
            slots = [self._slots[i] for i in plan.parameters]
            # Batched PowerSGD lets a bucket grow to a square. Memory that a group offers cannot grow.
            room = 0 if carries_tail else math.ceil(math.sqrt(plan.elems)) ** 2 - plan.elems
            bucket = Bucket(number, plan, slots, tail, self._allocate, room)
            delayed = slots[0].name in self._options.last
            bucket.also_waits = 1 if delayed and self._options.last_after is not None else 0
            buckets.append(bucket)
        return buckets

    def shadow(self, bucket: Bucket) -> Bucket:
        """A bucket like `bucket` that is all zeros and no parameter's."""
        slots = [Slot(slot.index, slot.name, slot.parameter) for slot in bucket.slots]
        return Bucket(bucket.index, bucket.plan, slots, bucket.tail_elems, self._allocate, bucket.room_elems)

    def _allocate(self, elems: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(self._average.group, elems, dtype, self._device)
