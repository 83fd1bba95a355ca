"""The process group: every collective and message goes through the engine."""

from __future__ import annotations

from .engine_moves import EngineMoves
from .engine_reductions import EngineReductions
from .messages import Messages


class ThroughEngine(EngineReductions, EngineMoves, Messages):
    """See the classes that it is made of."""
