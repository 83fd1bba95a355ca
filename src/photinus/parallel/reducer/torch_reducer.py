"""Names of torch's reducer that libraries and torch's own tools touch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .used_parameters import UsedParameters

__all__ = ["TorchReducerNames"]


class TorchReducerNames:
    """Names that exist for others; nothing in this package calls them. A base of Reducer."""

    if TYPE_CHECKING:
        used: UsedParameters
        rank: int

        def unfinished(self) -> int:
            """See Reducer."""

    def _rebuild_buckets(self) -> bool:
        """Libraries ask for this before a forward of their own; the wrapper does it when all ranks are there."""
        return False

    def _ddp_graph_static(self) -> bool:
        return self.used.always_the_same

    def _get_local_used_map(self) -> torch.Tensor:
        return self.used.ranks

    def _check_reducer_finalized(self) -> None:
        if self.unfinished():
            raise RuntimeError(
                f"rank {self.rank}: the last backward did not end: {self.unfinished()} gradients have not come"
            )
