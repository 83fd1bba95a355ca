"""Which parameters got a gradient, and on how many ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..exchange.collectives import Average, Pending
from .static_graph import StaticGraph
from .streams import sent_to


class UsedParameters:
    """The ranks' word to each other on who used what: one small all-reduce per round, where it is needed.

    Args:
        asked: whether it may change from round to round. If not, all are used, unless `static_graph` is there.

    Attributes:
        always_the_same: whether the unused ones of this rank were the same in each round so far.
    """

    def __init__(
        self,
        average: Average,
        count: int,
        device: torch.device,
        *,
        asked: bool,
        static_graph: StaticGraph | None,
    ) -> None:
        self._average = average
        self._static_graph = static_graph
        self._asked = asked
        self._ranks = torch.zeros(count, dtype=torch.int32, device=device)
        self._exchanged = False
        self._unused_before: frozenset[int] | None = None
        self.always_the_same = True

    @property
    def ranks(self) -> torch.Tensor:
        """On how many ranks each parameter got a gradient in the last round: int32 [parameters]."""
        return self._ranks

    @property
    def due(self) -> bool:
        """Whether this round has to exchange it."""
        if self._static_graph is not None:
            return self._static_graph.used_somewhere is None
        return self._asked

    def start(self, touched: Sequence[bool]) -> Pending:
        """Starts the exchange of what this rank used; `finish` has to follow."""
        self._ranks = sent_to(self._ranks.device, touched, torch.int32)
        work: Any = dist.all_reduce(self._ranks, group=self._average.group, async_op=True)
        pending: Pending = work
        return pending

    def finish(self, work: Pending) -> None:
        """Waits for the other ranks' word."""
        work.wait()
        self._exchanged = True
        if self._static_graph is not None:
            self._static_graph.used_somewhere = [count > 0 for count in self._ranks.tolist()]

    def somewhere(self) -> list[bool]:
        """For each parameter, whether some rank used it in this round; [] where nobody asks: all are used."""
        if self._static_graph is not None:
            return self._static_graph.used_somewhere or []
        return [count > 0 for count in self._ranks.tolist()] if self._exchanged else []

    def note_unused(self, indices: Iterable[int]) -> None:
        """Remembers which parameters this rank did not use in the round that ends."""
        unused = frozenset(indices)
        if self._unused_before is not None and unused != self._unused_before:
            self.always_the_same = False
        self._unused_before = unused
