"""Parameters that got a gradient, and on how many ranks; and models that promise to use the same ones in each step.

With a static graph the first backward is only watched: everything is launched at its end, when it is known which
parameters got a gradient and how many pieces of it (a layer inside several reentrant checkpoints gets one from each).
From the second on, a parameter is complete when it has as many as in the first, and nobody waits for those that had
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...errors import PhotinusError
from ..exchange.collectives import GroupAverage, Pending
from .autograd import sent_to
from .buckets import Slot
from .timeline import Timeline


class StaticGraph:
    """The parameters that the first backward of this rank used.

    Attributes:
        learned: whether there has been one.
        used_somewhere: for each parameter, whether it got a gradient on some rank; None as long as it is not known.
    """

    def __init__(self, rank: int, timeline: Timeline) -> None:
        self._rank = rank
        self._timeline = timeline
        self._arrivals: list[int] | None = None
        self.used_somewhere: list[bool] | None = None

    @property
    def learned(self) -> bool:
        """Return whether the first backward is over."""
        return self._arrivals is not None

    def learn(self, slots: Sequence[Slot]) -> None:
        """Remembers what came in the backward that ends now."""
        self._arrivals = [slot.arrivals for slot in slots]

    def never_used(self, slot: Slot) -> bool:
        """Return whether the first backward gave this parameter no gradient."""
        return self._arrivals is not None and self._arrivals[slot.index] == 0

    def completes(self, slot: Slot) -> bool:
        """Return whether the gradient that has come is the last one of this parameter in this backward.

        Raises:
            PhotinusError: it is one more than in the first backward.
        """
        # Nothing is launched before the end of this backward, so every arrival may count as the last.
        if self._arrivals is None:
            return True
        expected = self._arrivals[slot.index]
        if slot.arrivals > expected:
            was = "got no gradient" if expected == 0 else f"got {expected} gradients"
            # It begins with the sentence of torch's class, which people search for.
            self._timeline.error = (
                f"rank {self._rank}: Your training graph has changed in this iteration, but static_graph=True promises "
                f"that it does not: parameter {slot.name} {was} in the first backward, and one more now. Leave "
                f"static_graph out, or pass find_unused_parameters=True if it changes which parameters are used."
            )
            raise PhotinusError(self._timeline.error)
        return slot.arrivals == expected


class UsedParameters:
    """The ranks' word to each other on who used what: one small all-reduce per round, where it is needed.

    Args:
        may_change: whether it may change from round to round. If not, all are used, unless `static_graph` is there.

    Attributes:
        ranks: on how many ranks each parameter got a gradient in the last round: int32 [parameters].
        always_the_same: whether the unused ones of this rank were the same in each round so far.
    """

    def __init__(
        self, average: GroupAverage, count: int, *, may_change: bool, static_graph: StaticGraph | None
    ) -> None:
        self._average = average
        self._static_graph = static_graph
        self._may_change = may_change
        self.ranks = torch.zeros(count, dtype=torch.int32, device=average.device)
        self._exchanged = False
        self._unused_before: frozenset[int] | None = None
        self.always_the_same = True

    @property
    def due(self) -> bool:
        """Return whether this round has to exchange it."""
        if self._static_graph is not None:
            return self._static_graph.used_somewhere is None
        # It costs an exchange, so nobody asks where the user says that all are used.
        return self._may_change

    def start(self, touched: Sequence[bool]) -> Pending:
        """Starts the exchange of what this rank used; `finish` has to follow."""
        # Numbers, not truth values: the sum says on how many ranks each was used, which `ranks` shows.
        self.ranks = sent_to(self.ranks.device, touched, torch.int32)
        work: Any = dist.all_reduce(self.ranks, group=self._average.group, async_op=True)
        pending: Pending = work
        return pending

    def finish(self, work: Pending) -> None:
        """Waits for the other ranks' word."""
        work.wait()
        self._exchanged = True
        if self._static_graph is not None:
            # Asked once: with a static graph the answer is that of every later round.
            self._static_graph.used_somewhere = [count > 0 for count in self.ranks.tolist()]

    def somewhere(self) -> list[bool]:
        """For each parameter, whether some rank used it in this round; [] where nobody asks: all are used."""
        if self._static_graph is not None:
            return self._static_graph.used_somewhere or []
        # On a GPU this waits for the device, which is why nobody is asked where all are used.
        return [count > 0 for count in self.ranks.tolist()] if self._exchanged else []

    def note_unused(self, indices: Iterable[int]) -> None:
        """Remembers which parameters this rank did not use in the round that ends."""
        unused = frozenset(indices)
        # torch's `_ddp_graph_static` answers with it, from which users see whether static_graph=True is safe.
        if self._unused_before is not None and unused != self._unused_before:
            self.always_the_same = False
        self._unused_before = unused
