"""A reducer's buckets: which gradients lie together, what travels with them, and when each exchange starts.

A bucket is launched as soon as it is complete, always in the same order on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..exchange.collectives import Average, allocate
from ..tracing.spans import until_done
from .bucket_exchange import BucketExchange
from .buckets import ALIGNMENT_BYTES, BucketPlan, assign_buckets
from .gradient_memory import Bucket, Slot, bring_home
from .options import ReducerOptions
from .round_errors import NanGuard
from .streams import keep_until_read
from .timeline import Timeline
from .used_parameters import StaticGraph


class BucketLauncher:
    """Makes the buckets of some parameters, and knows which of them are under way in this round.

    Args:
        slots: of the parameters with dense gradients.

    Attributes:
        buckets: in the order in which they are launched.
        exchange: how buckets travel.
        order: indices of parameters in the order in which gradients are expected; None: reverse registration order.
        with_graph: the gradients of this round that carry a graph (create_graph), which goes around the average.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        average: Average,
        exchange: BucketExchange,
        options: ReducerOptions,
        *,
        guard: NanGuard | None,
        static_graph: StaticGraph | None,
        timeline: Timeline,
    ) -> None:
        self.exchange = exchange
        self.buckets: list[Bucket] = []
        self.order: list[int] | None = None
        self.with_graph: list[tuple[Slot, torch.Tensor]] = []
        self._slots = slots
        self._average = average
        self._options = options
        self._guard = guard
        self._static_graph = static_graph
        self._timeline = timeline
        self._launched = 0
        self._waits_for_end = False

    # ---- making

    def agree_on_order(self, indices: Sequence[int]) -> None:
        """Takes the order in which rank 0 saw gradients; every rank calls it.

        Args:
            indices: of parameters; where one comes twice, the first counts.
        """
        self.order = list(dict.fromkeys(indices))
        # Ranks may have seen other orders: by branches of the model, or by the timing of autograd's threads.
        if self._average.world_size > 1:
            agreed = torch.tensor(self.order, dtype=torch.int64, device=self._average.device)
            dist.broadcast(agreed, group=self._average.group, group_src=0)
            self.order = agreed.tolist()

    def plans(self) -> list[BucketPlan]:
        """The layout in the present order; its indices are those of `slots`."""
        position = {slot.index: i for i, slot in enumerate(self._slots)}
        return assign_buckets(
            [slot.parameter for slot in self._slots],
            cap_bytes=self._options.bucket_cap_bytes,
            caps_bytes=self._options.caps_bytes,
            order=None if self.order is None else [position[i] for i in self.order if i in position],
            alignment_bytes=ALIGNMENT_BYTES if self.exchange.averages else 1,
        )

    def make(self) -> None:
        """Makes the buckets, in the group's memory where it offers some; `reset` comes next."""
        buckets: list[Bucket] = []
        plans = self.plans()
        for number, plan in enumerate(plans):
            is_last = number == len(plans) - 1
            slots = [self._slots[i] for i in plan.parameters]
            # Batched PowerSGD lets a bucket grow to a square. Memory that a group offers cannot grow.
            room = 0 if self.exchange.averages else math.ceil(math.sqrt(plan.elems)) ** 2 - plan.elems
            buckets.append(Bucket(number, plan, slots, self._allocate, room, is_last))
        self.buckets = buckets

    def shadow(self, bucket: Bucket) -> Bucket:
        """A bucket like `bucket` that is all zeros and no parameter's."""
        # New slots, since making a bucket ties its slots to it, and the real ones belong to the real bucket.
        slots = [Slot(slot.index, slot.name, slot.parameter) for slot in bucket.slots]
        return Bucket(bucket.index, bucket.plan, slots, self._allocate, bucket.room_elems, bucket.is_last)

    def _allocate(self, elems: int, dtype: torch.dtype) -> torch.Tensor:
        return allocate(self._average.group, elems, dtype, self._average.device)

    # ---- launching

    def bring_home(self, slots: Sequence[Slot]) -> None:
        """Puts gradients of this round into their places."""
        if self._waits_for_end:  # by another stream than made them
            for slot in slots:
                keep_until_read(slot.parameter.grad)
        self.with_graph += bring_home(slots, as_views=self._options.gradients_are_views)

    def launch_complete(self) -> None:
        """Starts complete buckets, up to the first that is not."""
        # How many gradients a parameter gets is known only after the first backward of a static graph.
        learning = self._static_graph is not None and not self._static_graph.learned
        if self._options.overlap and not learning and not self._waits_for_end:
            # In order only: a later bucket that is complete first would be matched with an earlier one of another rank.
            while self._launched < len(self.buckets) and self.buckets[self._launched].pending == 0:
                self._launch_next()

    def wait_for_end(self) -> None:
        """Nothing more of this round is launched before the end of backward."""
        self._waits_for_end = True

    def launch_all(self) -> None:
        """Starts all that remain."""
        while self._launched < len(self.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self.buckets[self._launched]
        self._launched += 1
        # A gradient from `no_sync` waits for its average, whether this backward has added to it or not.
        waiting = any(slot.touched or not slot.absent for slot in bucket.slots)
        bucket.skipped = self._options.skip_unused and not waiting
        if bucket.skipped:
            return
        if bucket.arriving:
            self.bring_home(bucket.arriving)
            bucket.arriving.clear()
        self._timeline.note("exchange")
        if self._guard is not None:
            self._guard.watch(bucket)
        name = f"bucket {bucket.index} ({bucket.flat.nbytes} bytes)"
        bucket.work = until_done(name, lambda: self.exchange.start(bucket))

    def reset(self) -> None:
        """For the next round."""
        self._launched = 0
        self._waits_for_end = False
        self.with_graph.clear()
        for bucket in self.buckets:
            # All gradients count, those that never come too: `_count_absent` takes them off.
            bucket.pending = len(bucket.slots)
            bucket.work, bucket.skipped = None, False
            bucket.arriving.clear()
