"""What went wrong with a backward: said at its end, or, where code expects it so, at the next forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import MissingGradientError
from .gradient_memory import Slot
from .missing_gradients import missing_text, other_ranks_text
from .options import ReducerOptions
from .timeline import Timeline

__all__ = ["RoundErrors"]


class RoundErrors:
    """Makes and raises the errors of a reducer's rounds.

    Args:
        rank: of this process in the group.
        total: number of parameters that are reduced.
        options: of the reducer.
        timeline: keeps the text of the last error.
    """

    def __init__(self, rank: int, total: int, options: ReducerOptions, timeline: Timeline) -> None:
        self._rank = rank
        self._total = total
        self._options = options
        self._timeline = timeline
        self._kept: MissingGradientError | None = None

    def missing(self, slots: Sequence[Slot]) -> MissingGradientError:
        """These parameters got no gradient."""
        static = self._options.static_graph
        return self._error(missing_text(self._rank, slots, self._total, self._options.path, static_graph=static))

    def check_others(self, status: torch.Tensor | None) -> None:
        """Raises (or keeps) an error if another rank's backward went wrong.

        Args:
            status: an element per rank after the exchange, above zero for such a rank; None where it did not travel.
        """
        if status is not None and bool((status > 0).any()):
            self.raise_or_keep(self._error(other_ranks_text(self._rank, (status > 0).nonzero().flatten().tolist())))

    def raise_or_keep(self, error: MissingGradientError) -> None:
        """Raises it now, at the end of backward, unless the options say: at the next forward."""
        if not self._options.late_errors:
            raise error
        self._kept = error

    def raise_kept(self) -> None:
        """A forward begins."""
        if self._kept is not None:
            error, self._kept = self._kept, None
            raise error

    def _error(self, text: str) -> MissingGradientError:
        self._timeline.error = text
        return MissingGradientError(text)
