"""Spreading one model over the ranks of a process group. Speaks plain torch.distributed, over any backend."""

from __future__ import annotations

from .ddp import DistributedDataParallel
from .naive import average_gradients, broadcast_model
from .strategies import STRATEGIES, find_strategy, strategy_of, uncompiled, wrap_model
from .strategy import Strategy
from .sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm
from .tracing import trace

__all__ = [
    "STRATEGIES",
    "DistributedDataParallel",
    "Strategy",
    "SyncBatchNorm",
    "average_gradients",
    "broadcast_model",
    "convert_sync_batchnorm",
    "find_strategy",
    "revert_sync_batchnorm",
    "strategy_of",
    "trace",
    "uncompiled",
    "wrap_model",
]
