"""A model that promises to use the same parameters in the same way in every step.

The first backward is only watched: everything is launched at its end, when it is known which parameters got a
gradient and how many pieces of it (a layer inside several reentrant checkpoints gets one from each). From the second
on, a parameter is complete when it has as many as in the first, and nobody waits for those that had none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import PhotinusError
from .gradient_memory import Slot
from .timeline import Timeline


class StaticGraph:
    """What the first backward of this rank taught.

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
        """Whether the first backward is over."""
        return self._arrivals is not None

    def learn(self, slots: Sequence[Slot]) -> None:
        """Remembers what came in the backward that ends now."""
        self._arrivals = [slot.arrivals for slot in slots]

    def never_used(self, slot: Slot) -> bool:
        """Whether the first backward brought this parameter no gradient."""
        return self._arrivals is not None and self._arrivals[slot.index] == 0

    def completes(self, slot: Slot) -> bool:
        """Counts a gradient; returns whether it is the last one of this parameter in this backward.

        Raises:
            PhotinusError: it is one more than in the first backward.
        """
        slot.arrivals += 1
        if self._arrivals is None:
            return True
        expected = self._arrivals[slot.index]
        if slot.arrivals > expected:
            was = "got no gradient" if expected == 0 else f"got {expected} gradients"
            self._timeline.error = (
                f"rank {self._rank}: Your training graph has changed in this iteration, but static_graph=True promises "
                f"that it does not: parameter {slot.name} {was} in the first backward, and one more now. Leave "
                f"static_graph out, or pass find_unused_parameters=True if it changes which parameters are used."
            )
            raise PhotinusError(self._timeline.error)
        return slot.arrivals == expected
