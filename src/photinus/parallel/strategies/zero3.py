"""Strategy "zero3": parameters, gradients and optimizer states are split; a unit is whole only while it computes."""

from __future__ import annotations

from typing import ClassVar

from .fully_sharded import FullyShardedStrategy


class Zero3Strategy(FullyShardedStrategy):
    """Gathered parameters are dropped after the forward of their unit, and gathered once more for its backward."""

    name: ClassVar[str] = "zero3"
    drops_after_forward: ClassVar[bool] = True
