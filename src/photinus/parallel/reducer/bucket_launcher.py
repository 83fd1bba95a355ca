"""Starts the exchanges of a reducer's buckets: as soon as each is complete, always in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .bucket_exchange import BucketExchange
from .gradient_memory import Bucket, Slot, bring_home
from .nan_guard import NanGuard
from .options import ReducerOptions
from .rank_facts import status_of
from .static_graph import StaticGraph
from .streams import keep_until_read
from .timeline import Timeline


class BucketLauncher:
    """Knows which buckets of this round are under way.

    Attributes:
        buckets: in the order in which they are launched.
        with_graph: the gradients of this round that carry a graph (create_graph), which goes around the average.
    """

    def __init__(
        self,
        exchange: BucketExchange,
        options: ReducerOptions,
        *,
        guard: NanGuard | None,
        static_graph: StaticGraph | None,
        timeline: Timeline,
    ) -> None:
        self.exchange = exchange
        self.buckets: list[Bucket] = []
        self._options = options
        self._guard = guard
        self._static_graph = static_graph
        self._timeline = timeline
        self.with_graph: list[tuple[Slot, torch.Tensor]] = []
        self._launched = 0
        self._waits_for_end = False

    @property
    def tail(self) -> torch.Tensor | None:
        """What the ranks say of themselves, see `rank_facts`; travels with the last bucket."""
        return self.buckets[-1].tail if self.buckets else None

    @property
    def all_launched(self) -> bool:
        """Whether every bucket of the round is under way."""
        return self._launched == len(self.buckets)

    def count_event(self) -> None:
        """What some buckets wait for besides their own gradients has happened."""
        for bucket in self.buckets:
            bucket.pending -= bucket.also_waits

    def bring_home(self, slots: Sequence[Slot]) -> None:
        """Puts gradients of this round into their places."""
        if self._waits_for_end:  # by another stream than made them
            for slot in slots:
                keep_until_read(slot.parameter.grad)
        self.with_graph += bring_home(slots, as_views=self._options.gradients_are_views)

    def launch_complete(self) -> None:
        """Starts complete buckets, up to the first that is not."""
        learning = self._static_graph is not None and not self._static_graph.learned
        if self._options.overlap and not learning and not self._waits_for_end:
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
        began = self._timeline.exchange_began()
        if self._guard is not None:
            self._guard.watch(bucket, status_of(self.tail) if self.all_launched else None)
        bucket.work = self.exchange.start(bucket)
        self._timeline.bucket_launched(began, bucket)

    def reset(self) -> None:
        """For the next round."""
        self._launched = 0
        self._waits_for_end = False
        self.with_graph.clear()
        for bucket in self.buckets:
            bucket.pending = len(bucket.slots) + bucket.also_waits
            bucket.work = None
            bucket.arriving.clear()
        if self.tail is not None:
            self.tail.zero_()
