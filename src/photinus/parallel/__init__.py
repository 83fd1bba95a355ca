"""Spreading one model over the ranks of a process group. Speaks plain torch.distributed, over any backend.

exchange/    what ranks tell and send each other beside gradients
tracing/     when things happened, and the picture of it for all ranks
reducer/     averages gradients while backward is still computing
ddp/         DistributedDataParallel, and what it is made of above the reducer
zero/        parameters, gradients and optimizer states split over ranks
strategies/  ways of spreading a model, chosen by name
"""

from __future__ import annotations

from .ddp.ddp import DistributedDataParallel
from .ddp.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from .strategies.choose import (
    STRATEGIES,
    compare_ranks,
    find_strategy,
    is_replicated,
    step_facts_of,
    strategy_of,
    unwrap_compiled,
    wrap_model,
)
from .strategies.strategy import Strategy
from .tracing.trace import trace

__all__ = [
    "STRATEGIES",
    "DistributedDataParallel",
    "Strategy",
    "SyncBatchNorm",
    "compare_ranks",
    "convert_sync_batchnorm",
    "find_strategy",
    "is_replicated",
    "step_facts_of",
    "strategy_of",
    "trace",
    "unwrap_compiled",
    "wrap_model",
]
